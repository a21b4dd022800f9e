#!/usr/bin/env bash
# diffusers 0.42.1: Lumina 2's rotary tables are complex numbers in float64 that no `.to()` reaches.
#
# `Lumina2Transformer2DModel` keeps three tables of `complex128` in a plain list of its rope embedder. They are no buffers, so
# `model.to(device)` and `model.to(dtype)` leave them on the CPU in double precision. A model in bfloat16 rotates queries and keys by
# 128-bit complex numbers, and a call reads memory that is in no state_dict and among no buffers.
# One would expect buffers that move with the model, in float32 or its own precision.
#
# Seen: after `.to("meta", torch.bfloat16)` the tables are 3 of complex128 on the CPU, 0 buffers; rotations of a call: complex128.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6 diffusers==0.42.1 transformers==5.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import diffusers
import torch
from diffusers import Lumina2Transformer2DModel

model = Lumina2Transformer2DModel(
    sample_size=8, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1,
    multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), cap_feat_dim=8,
).eval().to(torch.bfloat16)
seen = set()


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and result.is_complex():
            seen.add(result.dtype)
        return result


x, text = torch.randn(1, 4, 8, 8).to(torch.bfloat16), torch.randn(1, 5, 8).to(torch.bfloat16)
with torch.no_grad(), Products():
    model(x, torch.tensor([0.5]).to(torch.bfloat16), text, torch.ones(1, 5, dtype=torch.bool))
model.to("meta")
tables = model.rope_embedder.freqs_cis
print(
    f"diffusers {diffusers.__version__}: {len(tables)} tables, {tables[0].dtype} on {tables[0].device}, "
    f"{len(list(model.buffers()))} buffers; rotations {sorted(map(str, seen))}"
)
assert all(t.dtype == torch.complex128 and t.device.type == "cpu" for t in tables), "diffusers behaves otherwise now"
assert not list(model.buffers()) and seen == {torch.complex128}, "diffusers behaves otherwise now"
PYTHON
