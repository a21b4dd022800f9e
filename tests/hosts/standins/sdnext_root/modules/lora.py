"""The host's native LoRA: each change puts new parameters in the layers' place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modules import devices

Layers = dict[str, torch.Tensor]


def network_activate(unet: Any, network: Layers, multiplier: float) -> None:
    """Bring the layers to `multiplier`; 0 restores the backups. Computed on the GPU, put where the UNet is."""
    wanted = (("lora", multiplier),) if multiplier else ()
    where = unet.device
    for name, module in unet.named_modules():
        if name not in network or getattr(module, "network_current_names", ()) == wanted:
            continue
        module.network_layer_name = "lora_unet_" + name.replace(".", "_")
        if getattr(module, "network_weights_backup", None) is None:
            module.network_weights_backup = module.weight.clone().to("cpu")
            module.network_bias_backup = None
        backup = module.network_weights_backup
        weight = backup.to(devices.device) + multiplier * network[name].to(devices.device, backup.dtype)
        module.weight = None
        module.weight = nn.Parameter(weight.to(where), requires_grad=False)
        module.network_current_names = wanted
