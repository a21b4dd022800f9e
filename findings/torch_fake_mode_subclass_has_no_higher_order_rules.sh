#!/usr/bin/env bash
# torch 2.13.0, CPU: a subclass of FakeTensorMode runs every operator that FakeTensorMode runs, and no higher-order operator.
#
# Rules of higher-order operators (torch.cond, while_loop, a Triton kernel with torch's wrapper) are looked up by the exact class
# of the mode, and not by its base classes. The subclass here is empty. The message advises to set
# `supports_higher_order_operators` on the mode; FakeTensorMode itself has it False, and needs no rule of the subclass for others.
# One would guess that an empty subclass behaves as its base does.
#
# Seen: FakeTensorMode: add runs, cond runs. Empty subclass: add runs, cond raises NotImplementedError ("no rule registered").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


class Empty(FakeTensorMode):
    pass


def outcome(kind, call):
    try:
        with kind(allow_non_fake_inputs=True):
            result = call(torch.empty(3))
        return f"runs, shape {tuple(result.shape)}"
    except NotImplementedError as error:
        return f"NotImplementedError: {str(error).split('.')[0].splitlines()[0][:70]}"


def add(x):
    return x + 1


def cond(x):
    return torch.ops.higher_order.cond(torch.tensor(True), lambda a: a + 1, lambda a: a - 1, (x,))


seen = {(kind.__name__, call.__name__): outcome(kind, call) for kind in (FakeTensorMode, Empty) for call in (add, cond)}
print(f"torch {torch.__version__}", *(f"{kind}, {call}: {found}" for (kind, call), found in seen.items()), sep="\n")
assert all(seen[each].startswith("runs") for each in seen if each != ("Empty", "cond")), "torch behaves otherwise now"
assert seen["Empty", "cond"].startswith("NotImplementedError"), "torch behaves otherwise now"
PYTHON
