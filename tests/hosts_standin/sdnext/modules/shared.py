"""What the host's `shared` offers an extension."""

from __future__ import annotations

from modules.options import OptionInfo, Options  # noqa: F401


class State:
    """Counts each job that begins; a run of the pipeline is one."""

    total_jobs = 0

    def begin(self, _title: str) -> None:
        self.total_jobs += 1


state = State()
opts = Options(diffusers_offload_mode="none", diffusers_offload_min_gpu_memory=0.2, lora_fuse_native=False)
