"""Stable Diffusion 1.5 in miniature, for a Forge of any kind. It knows the family by the widths of the UNet, and has
those of the text model and of the VAE in files.

`narrow()` gives the family the widths below, as an extension's script in the WebUI with and without this project; no
class of a model is changed. An image of 64² then takes a tenth of the time, and what the WebUI does stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WIDTH, CONTEXT = 64, 64
"""Of the UNet's first level, and of what it is told of the prompt."""
TEXT = {"hidden_size": CONTEXT, "intermediate_size": 2 * CONTEXT, "num_attention_heads": 4, "num_hidden_layers": 3}
VAE = 32
"""The width of its first level."""
FOLDER = "small"
"""Next to the checkpoints: the files that Forge and Forge Neo read the widths from."""


def write_files(repository: Path, folder: Path) -> Path:
    """Copy the files of the family, with these widths."""
    shutil.copytree(repository, folder / FOLDER)
    for part, changes in (("text_encoder", TEXT), ("vae", {"block_out_channels": [VAE * n for n in (1, 2, 4, 4)]})):
        file = folder / FOLDER / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return folder / FOLDER


def narrow(models: str) -> None:
    """Make the WebUI take the models in this folder for Stable Diffusion 1.5."""
    files = Path(models, FOLDER)
    if files.is_dir():
        families = importlib.import_module("huggingface_guess.model_list")
        families.SD15.huggingface_repo = str(files)
    else:
        families = importlib.import_module("ldm_patched.modules.supported_models")
        narrow_parts()
    families.SD15.unet_config.update(model_channels=WIDTH, context_dim=CONTEXT)


def narrow_parts() -> None:
    """The text model and the VAE of reForge and Forge Classic, which have the widths in code."""
    text, loader = (importlib.import_module(f"ldm_patched.modules.{name}") for name in ("sd1_clip", "sd"))
    text.CLIPTextConfig = SimpleNamespace(from_json_file=partial(_narrower_text, text.CLIPTextConfig))
    loader.AutoencoderKL = partial(_narrower_vae, loader.AutoencoderKL)


def _narrower_text(kind: Any, file: str) -> Any:
    return kind(**{**kind.from_json_file(file).to_dict(), **TEXT})


def _narrower_vae(kind: Any, *, ddconfig: dict[str, Any], **more: Any) -> Any:
    return kind(ddconfig={**ddconfig, "ch": VAE}, **more)
