"""An extension beside sd-webui-animatediff that makes its motion modules as small as the tiny checkpoint, with weights.

Run in the WebUI, which copies it among its extensions; the file that it writes is what AnimateDiff finds as its model.
"""

import sys
from pathlib import Path

import torch
from modules import script_callbacks

TIMES_SMALLER = 10  # 320 channels, of SD 1.5, against 32


def make(*_):
    motion = sys.modules["motion_module"]
    module, large = motion.MotionModule, motion.MotionModule.__init__

    def small(self, in_channels, *args, **kwargs):
        large(self, in_channels // TIMES_SMALLER, *args, **kwargs)

    module.__init__ = small
    file = Path(sys.modules["scripts.animatediff_mm"].mm_animatediff.get_model_dir()) / "motion.safetensors"
    if not file.exists():
        write(motion.MotionWrapper("motion", "", motion.MotionModuleType.AnimateDiffV3), file)


def write(wrapper, file):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in wrapper.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("pe"):
            state[name] = value.clone()
        elif value.dim() > 1:
            state[name] = noise * value[0].numel() ** -0.5
        else:
            state[name] = (1.0 if name.endswith("weight") else 0.0) + 0.05 * noise
    file.parent.mkdir(exist_ok=True)
    save_file(state, file)


script_callbacks.on_app_started(make)
