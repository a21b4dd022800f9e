"""Where events are played: on a CPU, or on a GPU with its graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pretended_card
import torch

from sfast_ext import Config

_CPU = Config(allow_cpu=True)
# Small nets gain nothing. Few graphs and little memory for them, or none would ever be evicted; the tolerance is that
# of bfloat16, the coarsest of the types: what the others may show is in `limits`.
_GPU = Config(max_graphs=3, drop_slower=False, tolerance=0.1)
_PRETENDED = Config(triton=False, max_graphs=3, drop_slower=False)


@dataclass(frozen=True)
class Ground:
    """A device and what holds on it."""

    name: str
    device: torch.device
    first: torch.dtype
    """Of the model as it is made."""
    autocast: torch.dtype
    not_cast: torch.dtype
    """A model of this type fails under autocast, or is not touched by it."""
    limits: dict[torch.dtype, float]
    """The relative error that an accelerated call may show."""
    calm: Config
    settings: tuple[Config, ...]
    eight_bits: bool = False
    """Whether settings have 8-bit integers."""

    @property
    def gpu(self) -> bool:
        """Whether there are graphs and another device to be moved to."""
        return self.device.type == "cuda"


CPU = Ground(
    "cpu",
    torch.device("cpu"),
    torch.float32,
    torch.bfloat16,
    torch.float64,
    {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2},
    _CPU,
    (
        _CPU, replace(_CPU, triton=False), replace(_CPU, cuda_graphs=False), replace(_CPU, max_plans=2),
        replace(_CPU, check="always"), replace(_CPU, check="never"), replace(_CPU, max_plans=1),
        replace(_CPU, tolerance=1e-12), Config(),
    ),
)  # fmt: skip

PRETENDED = Ground(
    "pretended",
    pretended_card.GPU,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2},
    _PRETENDED,
    (
        _PRETENDED, replace(_PRETENDED, max_graphs=1), replace(_PRETENDED, graph_memory_mb=0),
        replace(_PRETENDED, cuda_graphs=False), replace(_PRETENDED, max_plans=2),
        replace(_PRETENDED, check="always"), replace(_PRETENDED, check="never"), replace(_PRETENDED, tolerance=1e-12),
    ),
)  # fmt: skip
"""In `pretended_card`: weights of one device and of the other, and graphs that read at their addresses."""


def without_triton(on: Ground) -> Ground:
    """The same, and no setting uses Triton."""
    return replace(
        on, calm=replace(on.calm, triton=False), settings=tuple(replace(each, triton=False) for each in on.settings)
    )


def with_eight_bits(on: Ground) -> Ground:
    """The same, with products of 8-bit integers in most settings, for models in half precision. Plans may be twice as
    far from the original as the tolerance says, on the inputs that they were made with."""
    chosen = replace(on.calm, eight_bits=True)
    limits = {dtype: max(limit, 4 * chosen.tolerance) for dtype, limit in on.limits.items() if dtype.itemsize == 2}
    settings = (on.calm, chosen, *(replace(each, eight_bits=True) for each in on.settings))
    first = torch.float16 if on.gpu and on.name == "cuda" else torch.bfloat16
    return replace(on, first=first, limits={**on.limits, **limits}, calm=chosen, settings=settings, eight_bits=True)


def gpu() -> Ground:
    """The first GPU."""
    return Ground(
        "cuda",
        torch.device("cuda", torch.cuda.current_device()),
        torch.float16,
        torch.float16,
        torch.bfloat16,
        {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2},
        _GPU,
        (
            _GPU, replace(_GPU, max_graphs=1), replace(_GPU, max_graphs=2), replace(_GPU, graph_memory_mb=1),
            replace(_GPU, graph_memory_mb=4), replace(_GPU, graph_memory_mb=0), replace(_GPU, triton=False),
            replace(_GPU, cuda_graphs=False), replace(_GPU, max_plans=2),
            replace(_GPU, check="always"), replace(_GPU, check="never"), replace(_GPU, tolerance=1e-12),
        ),
    )  # fmt: skip
