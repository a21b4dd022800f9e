#!/usr/bin/env bash
# torch 2.13.0: fifteen ATen operators return their input, or a view of it, though their schemas say that the result is new memory.
#
# A schema tells by `alias_info` which results lie in the memory of which arguments (`Tensor(a)`), and passes over graphs of ATen
# operators read it to learn what may be overwritten. One would expect what `view` and `chunk` say of all operators that return views.
# These say nothing: some are called "unsafe" for autograd's sake, others return their input if there is nothing to do.
#
# Seen: a result shares the input's memory and `alias_info` is None for all of them; an in-place operation on the result changes the
# input. `chunk`, `view` and `expand` say so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>/dev/null
import torch

aten = torch.ops.aten
CALLS = {
    aten.unsafe_chunk.default: lambda op, x: op(x, 2)[0],
    aten.unsafe_split.Tensor: lambda op, x: op(x, 2)[0],
    aten.unsafe_split_with_sizes.default: lambda op, x: op(x, [2, 2])[0],
    aten._unsafe_view.default: lambda op, x: op(x, [24]),
    aten.broadcast_tensors.default: lambda op, x: op([x, torch.zeros(6)])[0],
    aten.meshgrid.indexing: lambda op, x: op([x[0], torch.zeros(3)], indexing="ij")[0],
    aten.cartesian_prod.default: lambda op, x: op([x[0]]),
    aten.atleast_3d.default: lambda op, x: op(x),
    aten.sum_to_size.default: lambda op, x: op(x, [4, 6]),
    aten.feature_alpha_dropout.default: lambda op, x: op(x, 0.5, False),
    aten.conj_physical.default: lambda op, x: op(x),
    aten._cast_Float.default: lambda op, x: op(x),
    aten.type_as.default: lambda op, x: op(x, torch.zeros(1)),
    aten.einsum.default: lambda op, x: op("ij->ji", [x]),
    aten.lift.default: lambda op, x: op(x),
}
SAY_SO = {
    aten.chunk.default: lambda op, x: op(x, 2)[0],
    aten.view.default: lambda op, x: op(x, [24]),
    aten.expand.default: lambda op, x: op(x, [4, 6]),
}


def shares(op, call):
    x = torch.ones(4, 6)
    y = call(op, x)
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def says_so(op):
    return any(result.alias_info is not None for result in op._schema.returns)


for op, call in {**CALLS, **SAY_SO}.items():
    print(f"{op}: shares memory {shares(op, call)}, says so {says_so(op)}")
assert len(CALLS) == 15
assert all(shares(op, call) and not says_so(op) for op, call in CALLS.items())
assert all(shares(op, call) and says_so(op) for op, call in SAY_SO.items())
x = torch.ones(4, 6)
CALLS[aten.unsafe_chunk.default](aten.unsafe_chunk.default, x).zero_()
assert x.sum() == 12
PYTHON
