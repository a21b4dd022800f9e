"""What the user can choose; a value object, so that two configurations compare."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class Config:
    """Settings of one accelerator.

    Raises:
        ValueError: a value is out of range; the message names the field and what it takes.
    """

    enabled: bool = True
    cuda_graphs: bool = True
    graph_memory_mb: int | None = None
    """Budget of the graph pool in MB (2**20 bytes); 0 means no limit, None a quarter of the GPU's memory, at most 4096
    MB."""
    max_graphs: int = 16
    triton: bool = True
    faster_sums: bool = False
    """On GeForce, add up products in half precision where that is faster. The picture may differ in details."""
    check: str = "first"
    """When a plan is compared with the original forward: "first" use, "always", "never"."""
    tolerance: float = 0.02
    """Relative L2 error, computed in fp32, that a plan may show against the original forward at most. It may show less
    if rounding explains less, see `runtime.rounding`."""
    allow_cpu: bool = False
    max_plans: int = 32
    drop_slower: bool = True
    """On a GPU, drop a plan that measures slower than the original forward."""
    vae: bool = True
    """Whether a host accelerates its VAE as well."""
    png: bool = True
    """Whether the PNG files that a host writes are compressed by several threads."""
    rare_calls: bool = False
    """The module is called about once for each picture, as a VAE is, and each call takes long and much memory. A plan
    is made when `rare_gain` says so, at most one in a generation; its later calls time it, no extra ones; and no kernel
    may need more memory at once than the original."""
    rare_gain: float = 0.5
    """The part of the original's time that a plan of such a module is taken to save. Its plan is made once the calls
    without one have lost as much time as making it costs; with `inf` at the second call of its kind."""

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"check must be one of {', '.join(CHECKS)}; it is {self.check!r}")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive; it is {self.tolerance}")
        if not self.rare_gain > 0:
            raise ValueError(f"rare_gain must be positive; it is {self.rare_gain}")
        if self.graph_memory_mb is not None and self.graph_memory_mb < 0:
            raise ValueError(f"graph_memory_mb must be 0 (no limit) or more; it is {self.graph_memory_mb}")
        if self.max_graphs < 1 or self.max_plans < 1:
            raise ValueError(
                f"max_graphs and max_plans must be at least 1; they are {self.max_graphs}, {self.max_plans}"
            )

    def builds_like(self, other: Config) -> bool:
        """Whether a plan built under one is the plan that the other would build."""
        return self._built_of() == other._built_of()

    def _built_of(self) -> tuple[bool, ...]:
        return self.triton, self.faster_sums, self.rare_calls
