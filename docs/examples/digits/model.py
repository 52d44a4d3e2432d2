"""The network: what training and serving share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

#: Where train.py puts the weights and app.py finds them.
WEIGHTS = Path(__file__).resolve().with_name("digits.safetensors")
#: Height and width of an image, in pixels.
SIZE = 8
#: The value of a fully inked pixel; no ink is 0.
INK = 16.0


class DigitNet(nn.Module):
    """A small convolutional network for grey digits of 8x8 pixels.

    Takes float32 (N, 1, 8, 8) with values 0..1 and returns logits, float32 (N, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of `images` (N, 1, 8, 8), 0..1."""
        return self.classifier(self.features(images))


def load(path: Path = WEIGHTS) -> DigitNet:
    """The trained network on the CPU, in eval mode.

    :param path: a safetensors file that train.py wrote.
    :raises FileNotFoundError: if it has not been written yet.
    """
    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}, run: python train.py")
    model = DigitNet()
    model.load_state_dict(load_file(path))
    return model.eval()


def to_input(images: np.ndarray) -> torch.Tensor:
    """What the network takes, float32 (N, 1, 8, 8) of 0..1, from `images` (N, 8, 8) of 0..16."""
    return torch.from_numpy(images.astype(np.float32) / INK).unsqueeze(1)
