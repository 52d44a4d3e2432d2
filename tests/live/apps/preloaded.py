"""Does to torch, when it is imported, what AT_IMPORT says; answers a forward pass of the same model."""

import os

import torch
import where

torch.manual_seed(0)
STEPS = {
    "nothing": lambda model: None,
    "forward": lambda model: model(torch.ones(256, 1024)),
    "share_memory": lambda model: model.share_memory(),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "half": lambda model: torch.nn.Linear(3000, 3000).half(),
    "many_threads": lambda model: (torch.set_num_threads(8), model(torch.ones(256, 1024))),
}
model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Sigmoid(), torch.nn.Linear(2048, 1024))
STEPS[os.environ["AT_IMPORT"]](model)
app = where.app


@app.get("/infer")
def infer() -> dict[str, object]:
    """The sum of one forward pass, and who did it."""
    with torch.inference_mode():
        return {"pid": os.getpid(), "sum": model(torch.ones(256, 1024)).double().sum().item()}
