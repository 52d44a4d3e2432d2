from __future__ import annotations

import pytest

from gpuworker.status.scoreboard import Scoreboard


@pytest.fixture
def board() -> Scoreboard:
    return Scoreboard()
