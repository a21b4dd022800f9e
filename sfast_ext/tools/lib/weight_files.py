"""Whether a file or a folder can be a model, before anything is loaded. torch is not imported."""

from __future__ import annotations

import json
from pathlib import Path

from sfast_ext.tools.lib import Unavailable

PIPELINE, UNET = "model_index.json", "config.json"


def check(path: Path, *, pipeline: bool) -> None:
    """Reads what describes the weights, not the weights.

    Args:
        path: a folder of diffusers or a checkpoint.
        pipeline: the folder must be a pipeline's; otherwise it may be a UNet's as well.

    Raises:
        Unavailable: it is no model that can be read.
    """
    if path.is_dir():
        _check_folder(path, pipeline)
    elif path.suffix.lower() != ".safetensors":
        raise Unavailable(f"{path} is neither a folder nor a .safetensors file: convert it to .safetensors first")
    else:
        _check_file(path)


def _check_folder(folder: Path, pipeline: bool) -> None:
    described = [folder / PIPELINE] if pipeline else [folder / PIPELINE, folder / "unet" / UNET, folder / UNET]
    found = next((file for file in described if file.is_file()), None)
    if found is None:
        wanted = PIPELINE if pipeline else f"{PIPELINE} or {UNET}"
        raise Unavailable(f"the folder {folder} has no {wanted}: name a folder that diffusers saved, or a file")
    try:
        json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise Unavailable(f"{found} cannot be read ({first_line(exc)}): save or download the model again") from exc
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors"))):
        _check_file(file)


def _check_file(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        if not file.stat().st_size:
            raise Unavailable(f"{file} is empty: download it again")
        with safe_open(str(file), framework="np") as opened:
            names = list(opened.keys())
    except (OSError, SafetensorError) as exc:
        said = f"{file} is damaged or was not downloaded to its end: download it again ({first_line(exc)})"
        raise Unavailable(said) from exc
    if not names:
        raise Unavailable(f"{file} contains no weights: download it again")


def first_line(exc: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    return next(iter(str(exc).strip().splitlines()), "") or type(exc).__name__
