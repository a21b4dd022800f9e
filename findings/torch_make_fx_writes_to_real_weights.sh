#!/usr/bin/env bash
# torch 2.13.0: make_fx with fake inputs changes a real parameter that the function writes to under another name.
#
# `make_fx(tracing_mode="fake", _allow_non_fake_inputs=True)` computes nothing for fake tensors. `parameter.contiguous()` is the
# parameter itself, and `parameter.contiguous().mul_(2)` doubles it while the function is only traced.
# One would expect that tracing on fake tensors leaves the values of all tensors alone.
#
# Seen: the parameter is 2 after tracing, and was 1 before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

parameter = torch.nn.Parameter(torch.ones(1), requires_grad=False)


def function(x):
    return x + parameter.contiguous().mul_(2)


with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
    make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(torch.ones(1))
print(f"torch {torch.__version__}: the parameter was 1 and is {float(parameter)} after tracing")
assert float(parameter) == 2, "torch behaves otherwise now"
PYTHON
