from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_weights_in_each_run() -> None:
    torch.manual_seed(0)
