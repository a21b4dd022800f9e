#!/usr/bin/env bash
# accelerate 1.15.0: `dispatch_model` puts one parameter in the place of all empty ones, if one of them is tied.
#
# It knows tied parameters by the address of their memory. Parameters without elements have none: `data_ptr()` is 0 for each. If one
# of them is tied to another, 0 is in its table, and `dispatch_model` takes every other empty parameter of the model for the same
# one. It replaces them, whatever their shape is, and the forward raises afterwards. Without a tied parameter it leaves them.
# One would expect that parameters of different shapes are never one, or that empty parameters are not compared by address.
#
# Seen: b.weight (5, 0) became a.weight (3, 0), "The expanded size of the tensor (3) must match the existing size (5)".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import accelerate
import torch
from accelerate import dispatch_model
from torch import nn


class Net(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(0, 3), nn.Linear(0, 5), nn.Linear(0, 3)
        if tied:
            self.c.weight = self.a.weight

    def forward(self, x):
        return self.a(x), self.b(x), self.c(x)


x, everywhere = torch.empty(2, 0), dict.fromkeys("abc", "cpu")
for tied in (False, True):
    net = Net(tied)
    assert [tuple(y.shape) for y in net(x)] == [(2, 3), (2, 5), (2, 3)]
    dispatch_model(net, everywhere, force_hooks=True)
    shape, one, error = tuple(net.b.weight.shape), net.b.weight is net.a.weight, None
    try:
        net(x)
    except RuntimeError as exc:
        error = str(exc)
    print(f"accelerate {accelerate.__version__}, tied {tied}: b.weight {shape}, that of a {one}; {error}")
    if tied:
        assert one and shape == (3, 0) and error is not None, "accelerate behaves otherwise now"
    else:
        assert not one and shape == (5, 0) and error is None, "accelerate behaves otherwise now"
PYTHON
