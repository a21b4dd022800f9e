"""What the host's `shared` offers an extension."""

from __future__ import annotations

from modules.options import OptionInfo, Options  # noqa: F401


class State:
    """Counts each job that begins; a run of the pipeline is one."""

    total_jobs = 0
    job, textinfo, interrupted, skipped = "", None, False, False

    def begin(self, title: str = "") -> None:
        self.total_jobs += 1
        self.job, self.interrupted, self.skipped = title, False, False

    def end(self) -> None:
        self.job = ""

    def interrupt(self) -> None:
        self.interrupted = True


state = State()
gpu_memory = 1.0
"""GiB."""
warnings: list[str] = []
"""What the host would have logged as one."""
opts = Options(
    diffusers_offload_mode="none",
    diffusers_offload_pre=True,
    diffusers_offload_min_gpu_memory=0.2,
    diffusers_offload_max_gpu_memory=0.6,
    diffusers_offload_always="",
    diffusers_offload_never="",
    group_offload_type="leaf_level",
    lora_fuse_native=False,
)
