#!/usr/bin/env bash
# peft 0.21.2, torch 2.13.0, CPU: a DoRA on a 3x3 convolution raises once the model is channels-last; LoRA, LoHa and LoKr do not.
#
# diffusers recommends `unet.to(memory_format=torch.channels_last)` for speed. The call moves the adapter's weights too, and
# DoRA alone views its weight as a matrix. Moved back to contiguous memory, the same model runs again.
# One would guess that a memory format decides the speed of an adapter, and that all kinds of adapters take it alike.
#
# Seen: lora, loha, lokr run in both formats; dora runs contiguous, raises RuntimeError ("view size is not compatible")
# channels-last, and runs after the way back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6 peft==0.21.2
"$folder/venv/bin/python" - <<'PYTHON'
import peft
import torch
from torch import nn

KINDS = {
    "lora": peft.LoraConfig(r=2, target_modules=["conv"]),
    "dora": peft.LoraConfig(r=2, target_modules=["conv"], use_dora=True),
    "loha": peft.LoHaConfig(r=2, target_modules=["conv"]),
    "lokr": peft.LoKrConfig(r=2, target_modules=["conv"]),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


def outcome(model, memory_format):
    try:
        model.to(memory_format=memory_format)(torch.randn(1, 4, 8, 8))
        return "runs"
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:32]}"


print(f"peft {peft.__version__}, torch {torch.__version__}")
for name, config in KINDS.items():
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(), config)
    formats = torch.contiguous_format, torch.channels_last, torch.contiguous_format
    seen = [outcome(model, each) for each in formats]
    print(f"{name}: contiguous {seen[0]}; channels-last {seen[1]}; contiguous again {seen[2]}")
    expected = "RuntimeError: view size is not compatible with" if name == "dora" else "runs"
    assert seen[0] == seen[2] == "runs" and expected.startswith(seen[1]), "peft behaves otherwise now"
PYTHON
