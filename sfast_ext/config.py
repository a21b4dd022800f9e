"""What the user can choose; a value object, so that two configurations compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Bounds(NamedTuple):
    """The values that a number may have."""

    words: str
    minimum: float
    excluded: bool = False
    """Whether the minimum itself is not valid."""

    def permit(self, value: float) -> bool:
        """Whether this is a valid value. NaN is not."""
        return value > self.minimum if self.excluded else value >= self.minimum


BOUNDS = {
    "graph_memory_mb": Bounds("a number of MB, 0 (no limit) or more", 0),
    "max_graphs": Bounds("a number, 1 or more", 1),
    "max_plans": Bounds("a number, 1 or more", 1),
    "tolerance": Bounds("a number above 0", 0, excluded=True),
    "rare_gain": Bounds("a number above 0", 0, excluded=True),
    "rare_build_ms": Bounds("a number above 0", 0, excluded=True),
}
"""By field of `Config`. The settings page, requests and the X/Y/Z plot have these as well."""
CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class Config:
    """Settings of one accelerator.

    Raises:
        ValueError: a value is out of range; the message names the field and its valid values.
    """

    enabled: bool = True
    cuda_graphs: bool = True
    graph_memory_mb: int | None = None
    """Budget of the graph pool in MB (2**20 bytes); 0 means no limit, None a quarter of the GPU's memory, at most 4096
    MB."""
    max_graphs: int = 16
    triton: bool = True
    faster_sums: bool = False
    """On GeForce, add up products in half precision if that is faster. The image may differ in details."""
    eight_bits: bool = False
    """Compute linear layers and 3x3 convolutions with 8-bit integers, those excepted whose error is large. The
    image differs in details."""
    resident: bool | None = None
    """With `eight_bits`, the half-precision weights of the layers that are computed so stay in system memory; None: if
    the GPU has less memory than twice what all weights take."""
    check: str = "first"
    """When a plan is compared with the original forward: "first" use, "always", "never"."""
    tolerance: float = 0.02
    """Maximum relative L2 error of a plan against the original forward, computed in fp32. The limit is lower if
    rounding explains less, see `runtime.verify`. A plan with 8-bit integers may be twice as far away."""
    allow_cpu: bool = False
    max_plans: int = 32
    drop_slower: bool = True
    """On a GPU, drop a plan that measures slower than the original forward."""
    rare_calls: bool = False
    """The module is called about once for each image, and each call takes long and much memory. A plan is made when
    `rare_gain` says so, at most one in a generation. Later calls of it are timed, and no calls are added for that. No
    kernel may need more memory at once than the original."""
    rare_gain: float = 0.5
    """The expected part of the original's time that a plan of such a module saves. Its plan is made once the calls
    without one have lost as much time as making it costs; with `inf` at the second call of its kind."""
    rare_build_ms: float = 1500.0
    """What making a plan of such a module is taken to cost before one was made, in milliseconds. The default is that of
    a VAE: 600 to 2000 ms with an NVIDIA H200."""

    earned: bool = False
    """Make a plan for a new kind of call, such as another size, only if those before were earned back, or if such calls
    repeat or have lost what the plan costs; see `plans.payback.Earnings`. Needs a host that announces generations."""

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"check must be one of {', '.join(CHECKS)}; it is {self.check!r}")
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            by_default = value is None and getattr(Config, name) is None
            if not by_default and not bounds.permit(value):
                raise ValueError(f"{name} must be {bounds.words}; it is {value}")

    def builds_like(self, other: Config) -> bool:
        """Whether a plan built under one is the plan that the other would build."""
        return self._built_of() == other._built_of()

    def _built_of(self) -> tuple[bool | None, ...]:
        return self.triton, self.faster_sums, self.eight_bits, self.resident, self.rare_calls
