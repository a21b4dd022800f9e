#!/usr/bin/env bash
# torch 2.13.0, CPU: group_norm on a channels-last tensor loses digits that it keeps on the contiguous one.
#
# The values of a group are nearly equal here: 8, give or take 0.01. The error of the channels-last result is that of a variance
# from which digits have cancelled. The same values in contiguous memory give a result that is 2,500 times as near.
# One would expect that the memory format changes the speed of a normalisation, and not its accuracy.
#
# Seen: 3.6e-05 (contiguous) and 9.0e-02 (channels-last) from float64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

torch.manual_seed(0)
x = 8.0 + 0.01 * torch.randn(2, 32, 16, 16)
weight, bias = torch.randn(32), torch.randn(32)
exact = F.group_norm(x.double(), 8, weight.double(), bias.double(), 1e-6)


def distance(given):
    return float((F.group_norm(given, 8, weight, bias, 1e-6).double() - exact).norm() / exact.norm())


contiguous, channels_last = distance(x), distance(x.contiguous(memory_format=torch.channels_last))
print(f"torch {torch.__version__}: contiguous {contiguous:.1e}, channels-last {channels_last:.1e} from float64")
assert contiguous < 1e-4 and channels_last > 100 * contiguous, "torch behaves otherwise now"
PYTHON
