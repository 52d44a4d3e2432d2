import json

import telling
import torch
from django.http import HttpRequest, JsonResponse

telling.note_import()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)).to("cuda").eval()


def infer(request: HttpRequest) -> JsonResponse:
    x = torch.full((64,), float(json.loads(request.body)), device="cuda")
    with torch.no_grad():
        y = model(x)
    return JsonResponse(telling.answer(y.tolist(), model[0].weight, x, y))
