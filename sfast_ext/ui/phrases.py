"""Sentences as pieces that a host's localisation finds: what each sentence of a kind has, apart from names and numbers.

The hosts translate the texts of a page each as a whole, so a sentence with a name in it would never be found.
"""

from __future__ import annotations

import functools
import re

PHRASES = (
    # of the badge
    "The last picture was not accelerated:",
    "steps of the last picture were not accelerated:",
    "The WebUI's own code makes every picture.",
    "preparing",
    "partly,",
    "original:",
    "s so far.",
    "picture,",
    "pictures,",
    "batch",
    "tokens",
    # of reasons, see tests/ui/test_phrases.py
    "this WebUI lacks what Stable Fast relies on:",
    "a hypernetwork is active:",
    "remove it from the prompt to accelerate",
    "an argument changes at each step, no plan is made for each of its values:",
    "another UNet is active:",
    "is active around the call: it sees or changes each operation of torch",
    "torch.func transforms the call, by",
    "torch.library replaces torch's own",
    "set Settings > Stable Diffusion > SD Unet to None to accelerate",
    "the forward can read",
    "its forward calls a function that torch.compile made",
    "its forward cannot be recorded:",
    "its forward changes",
    "one of its arguments",
    "the same list is there twice among its arguments, and its forward changes it",
    "its forward draws random numbers",
    "its forward keeps state between calls, in",
    "its forward reads a number from a tensor",
    "its forward reads the value of a weight",
    "as a number",
    "its forward reads a tensor",
    "that is neither an argument nor a weight",
    "its forward reads a value from the device, or depends on one",
    "its forward replaces the data of a weight or a buffer",
    "its forward replaces the data of a tensor",
    "that it holds",
    "its forward writes to a weight or a buffer",
    "its forward writes to one of its arguments",
    "its forward writes to a tensor",
    "its forward writes to what may be a weight or an argument",
    "its plan differs from the original by",
    "more than rounding explains",
    "more than the tolerance of",
    "its plan failed:",
    "its plan is slower than the original",
    "ms against",
    "no plan could be built:",
    "offload mode",
    "works in a way that is not known in this version",
    "the extension Lora works in a way that is not known:",
    "turn it off in Extensions > Installed to accelerate",
    "choose 'none' in Settings > Model Offloading to accelerate",
    "moves the UNet off the GPU, and there is not enough free memory to keep it there",
    "some weights are on",
    "others on",
    "the GPU has compute capability",
    "it takes",
    "or later",
    "the model is on",
    "not on a GPU",
    "the model is quantised",
    "the model is quantised or stored in",
    "set Diffusion in Low Bits to Automatic, and load a model in half precision, to accelerate",
    "load one that is not quantised to accelerate",
    "the model is quantised: its layer",
    "by",
    "such layers are not accelerated",
    "the weights are on",
    "the plans on",
    "the model on",
    "has a foreign",
    "has no UNet",
    "load a Stable Diffusion 1, 2 or XL model to accelerate",
    "load a Stable Diffusion 1 or XL model to accelerate",
    "is a dict with keys that are neither text nor integers",
    "with layout",
    "not a plain tensor",
    "which a plan cannot take as an input",
    "is gone",
    "is in place of the forward of",
    "is on the meta device",
    "is on",
    "is replaced by",
    "turn it off to accelerate",
    "works inside the UNet",
    "an option that an extension has set",
    "replaces the model's forward and calls none of its blocks",
    "turn that extension off to accelerate",
    "is called with a bias of class",
    "is called with a bias a tensor of",
    "none, a tensor of floats and LowerTriangularMask can be recorded",
    "is called with dropout, which draws random numbers",
    "is called with tensors of",
    "dimensions",
    "3 and 4 can be recorded",
    "is called with",
    "which cannot be recorded",
    "cannot be recorded",
    "is a",
)


@functools.lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    longest_first = sorted(PHRASES, key=len, reverse=True)
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)")


@functools.lru_cache(maxsize=256)
def pieces(text: str) -> tuple[str, ...]:
    """A sentence in pieces, which make the sentence when they are put together: its phrases, what stands between them,
    and its full stop."""
    found: list[str] = []
    for index, piece in enumerate(_pattern().split(text)):
        stop = None if index % 2 else re.search(r"\.\s*$", piece)
        found += [piece] if stop is None else [piece[: stop.start()], stop[0]]
    return tuple(piece for piece in found if piece)
