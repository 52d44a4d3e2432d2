"""Train the network and write digits.safetensors: ``python train.py``, some seconds on two CPU cores."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from data import held_out, training
from model import WEIGHTS, DigitNet, to_input
from safetensors.torch import save as serialise
from torch.nn import functional

SEED = 0
EPOCHS = 30
BATCH = 64
#: Held-out accuracy below which nothing is written.
LOWEST_ACCURACY = 0.97


def main() -> None:
    start = time.monotonic()
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    # Batches this small gain nothing from a second thread, and lose much where something else wants its core.
    torch.set_num_threads(1)
    model = train(DigitNet())
    accuracy = accuracy_of(model)
    print(f"{accuracy:.2%} of the held-out images are right, after {time.monotonic() - start:.1f} s of training")
    if accuracy < LOWEST_ACCURACY:
        sys.exit(f"{accuracy:.2%} is below {LOWEST_ACCURACY:.0%}, so {WEIGHTS.name} is not written.")
    save(model, WEIGHTS)
    print(f"wrote {WEIGHTS}")


def train(model: DigitNet) -> DigitNet:
    """Train `model` in place, on the CPU, and return it in eval mode."""
    images, labels = training()
    inputs, targets = to_input(images), torch.from_numpy(labels)
    batches = -(-len(inputs) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=EPOCHS * batches)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs)).split(BATCH):
            loss = functional.cross_entropy(model(shifted(inputs[batch])), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def shifted(inputs: torch.Tensor) -> torch.Tensor:
    """`inputs` (N, 1, 8, 8), all moved by the same random -1, 0 or 1 pixel in each direction."""
    row, column = torch.randint(3, (2,)).tolist()
    height, width = inputs.shape[-2:]
    return functional.pad(inputs, (1, 1, 1, 1))[..., row : row + height, column : column + width]


@torch.inference_mode()
def accuracy_of(model: DigitNet) -> float:
    """The part, 0..1, of the held-out images for which `model` names the right digit."""
    images, labels = held_out()
    answers = model(to_input(images)).argmax(dim=1)
    return (answers == torch.from_numpy(labels)).float().mean().item()


def save(model: DigitNet, path: Path) -> None:
    """Write the weights so that whoever reads `path` meanwhile gets the old file or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(serialise(model.state_dict()))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
