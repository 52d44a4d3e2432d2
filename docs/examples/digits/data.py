"""The data: scikit-learn's 1797 handwritten digits, split here and nowhere else."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def training() -> tuple[np.ndarray, np.ndarray]:
    """The images to learn from, float32 (1347, 8, 8) of 0..16, and their digits, int64 (1347,)."""
    images, _, labels, _ = _split()
    return images, labels


def held_out() -> tuple[np.ndarray, np.ndarray]:
    """The images no training sees, float32 (450, 8, 8) of 0..16, and their digits, int64 (450,)."""
    _, images, _, labels = _split()
    return images, labels


def _split() -> list[np.ndarray]:
    digits = load_digits()
    images, labels = digits.images.astype(np.float32), digits.target.astype(np.int64)
    return train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
