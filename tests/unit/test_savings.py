from __future__ import annotations

import pytest

from gpuworker.weights.savings import advice

GIB = 2**30


@pytest.mark.parametrize(
    ("own", "workers", "devices", "saved"),
    [(GIB, 4, 1, "3.00"), (GIB, 4, 2, "2.00"), (3 * GIB, 2, 1, "3.00"), (20 << 20, 8, 1, "0.14")],
)
def test_tells_what_sharing_would_save(own: int, workers: int, devices: int, saved: str) -> None:
    assert f"would save {saved} GiB" in advice(own, workers, devices)


@pytest.mark.parametrize(
    ("own", "workers", "devices"), [(GIB, 1, 1), (GIB, 2, 2), (GIB, 2, 4), (1 << 20, 8, 1), (0, 9, 1)]
)
def test_says_nothing_where_little_is_to_be_saved(own: int, workers: int, devices: int) -> None:
    assert advice(own, workers, devices) == ""
