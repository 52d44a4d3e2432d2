"""The reproduction that circulates: two lines at module level, and a request that multiplies."""

import flask
import telling
import torch

telling.note_import()
torch.manual_seed(0)
x = torch.rand(500)
x = x.to("cuda:0")

app = flask.Flask(__name__)


@app.post("/")
def multiply() -> dict[str, object]:
    number = torch.tensor(float(flask.request.get_json())).to("cuda:0")
    product = x * number
    return telling.answer(product.sum().item(), x, number, product)
