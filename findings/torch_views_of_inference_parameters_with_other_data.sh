#!/usr/bin/env bash
# torch 2.13.0, CPU: a parameter that was made in inference mode and then got other data by `.data` cannot be viewed, nor be the
# weight of a product, and says that it is no inference tensor.
#
# Layers that are made in inference mode and filled by `layer.weight.data = loaded` fail at their first call, under any mode of
# gradients. Element-wise operations and copies of the same parameter work. With data that was itself made in inference mode all
# works, and so it does with a parameter made outside of it. One would guess that the parameter is what its data is.
#
# Seen: is_inference() False; p + 1 and p.clone() run; p.t(), p.view(-1) and F.linear(x, p) raise "Inference tensors do not track
# version counter."
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

OPERATIONS = {
    "p + 1": lambda p: p + 1,
    "p.clone()": lambda p: p.clone(),
    "p.t()": lambda p: p.t(),
    "p.view(-1)": lambda p: p.view(-1),
    "F.linear(x, p)": lambda p: F.linear(torch.ones(4, 2), p),
}


def parameter(made, given):
    with torch.inference_mode(made):
        p = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    with torch.inference_mode(given):
        data = torch.ones(3, 2)
    p.data = data
    return p


def outcome(p, operation):
    try:
        with torch.no_grad():
            operation(p)
        return "runs"
    except RuntimeError as error:
        return str(error)


print(f"torch {torch.__version__}")
seen = {}
for made in (False, True):
    for given in (False, True):
        p = parameter(made, given)
        print(f"made in inference mode: {made}, its data: {given}, is_inference(): {p.is_inference()}")
        for name, operation in OPERATIONS.items():
            seen[made, given, name] = outcome(p, operation)
            print(f"  {name}: {seen[made, given, name]}")
FAILING = {(True, False, name) for name in ("p.t()", "p.view(-1)", "F.linear(x, p)")}
assert not parameter(True, False).is_inference(), "torch behaves otherwise now"
assert all((seen[each] == "runs") == (each not in FAILING) for each in seen), "torch behaves otherwise now"
PYTHON
