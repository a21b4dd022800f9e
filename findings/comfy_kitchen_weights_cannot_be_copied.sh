#!/usr/bin/env bash
# comfy-kitchen 0.2.40: a layer with one of its quantised weights can be neither deep-copied nor pickled nor saved by torch.save.
#
# `QuantizedTensor` is a tensor subclass without storage: its codes and scales are attributes. It has no `__deepcopy__` and no
# `__reduce_ex__`, so torch copies and saves the storage that it has not. One would expect what torchao's subclasses do, which are
# made in the same way: `copy.deepcopy` of a model gives a second one, and its state dict can be saved. `clone` and `copy.copy` work.
#
# Seen, for INT8 and FP8 weights: "Attempted to call copy_() on an invalid python storage" and "Attempted to access the data pointer
# on an invalid python storage"; with torchao 0.18.0's Int8Tensor both work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6 comfy-kitchen==0.2.40 \
    torchao==0.18.0 packaging==25.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy
import io
import pickle

import torch
from comfy_kitchen.tensor import QuantizedTensor
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def saved(value):
    torch.save(value, io.BytesIO())


WAYS = {
    "copy.deepcopy": copy.deepcopy,
    "pickle of the weight": lambda layer: pickle.dumps(layer.weight),
    "torch.save of the state dict": lambda layer: saved(layer.state_dict()),
    "copy.copy of the weight": lambda layer: copy.copy(layer.weight),
    "clone of the weight": lambda layer: layer.weight.clone(),
}


def tried(layer):
    found = {}
    for name, way in WAYS.items():
        try:
            way(layer)
            found[name] = "works"
        except RuntimeError as error:
            found[name] = str(error)
    return found


found = {}
for layout in ("TensorWiseINT8Layout", "TensorCoreFP8Layout"):
    layer = torch.nn.Linear(32, 32, bias=False)
    weight = QuantizedTensor.from_float(torch.randn(32, 32), layout)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    found[f"comfy_kitchen, {layout}"] = tried(layer)
model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
quantize_(model, Int8WeightOnlyConfig())
found["torchao, Int8Tensor"] = tried(model[0])
for name, each in found.items():
    print(name, *(f"  {way}: {what}" for way, what in each.items()), sep="\n")
*kitchen, torchao = found.values()
refused = [all("invalid python storage" in each[way] for each in kitchen) for way in list(WAYS)[:3]]
works = [each[way] == "works" for each in kitchen for way in list(WAYS)[3:]]
assert all(refused) and all(works) and set(torchao.values()) == {"works"}, "they behave otherwise now"
PYTHON
