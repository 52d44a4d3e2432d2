"""A model of timm."""

import flask
import telling
import timm
import torch

telling.note_import()
torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10).cuda().eval()

app = flask.Flask(__name__)


@app.post("/")
def classify() -> dict[str, object]:
    image = torch.linspace(0, flask.request.get_json(), 3 * 64 * 64).view(1, 3, 64, 64).cuda()
    with torch.no_grad():
        probabilities = model(image).softmax(1)
    result = probabilities.cpu().numpy()[0].tolist()
    return telling.answer(result, next(model.parameters()), next(model.buffers()), image, probabilities)
