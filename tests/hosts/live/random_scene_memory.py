"""What the WebUI of `random_scenes.py` holds when it is at rest, and which of its plans ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .webui import WebUI, add_extension

ROUTE = "memory"
"""In the place of a step's route: memory is asked for."""
SCRIPT = """
import ctypes
import gc
from pathlib import Path

import torch
from fastapi import FastAPI
from modules import script_callbacks


class Mallinfo(ctypes.Structure):
    # man 3 mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def in_use():
    # what somebody has of the C library's memory, and what the library keeps free
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return {}
    mallinfo.restype = Mallinfo
    told = mallinfo()
    return {"malloc": told.uordblks + told.hblkhd, "malloc_free": told.fordblks}


def taken():
    # without the pages of files, such as those of a checkpoint, which the system takes back when it likes
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return None
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:")}


def mapped():
    # where the memory that belongs to no file lies: in the C library's heap, in its heaps of other threads (which begin
    # at multiples of 64 MB), in code that was compiled, or elsewhere: large tensors, objects of Python
    found = {"heap": 0, "heaps of threads": 0, "code": 0, "libraries": 0, "elsewhere": 0}
    kind = "elsewhere"
    try:
        lines = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
    except OSError:
        return {}
    for line in lines:
        if line[0] == "Anonymous:":
            found[kind] += 1024 * int(line[1])
        elif not line[0].endswith(":"):
            name = line[5] if len(line) > 5 else ""
            thread = int(line[0].partition("-")[0], 16) % (64 << 20) == 0
            bare = "code" if "x" in line[1] else "heaps of threads" if thread else "elsewhere"
            kind = "heap" if name == "[heap]" else "libraries" if name.startswith("/") else bare
    return {"mapped": found}


def pinned():
    # torch's pinned memory, with what torch keeps of freed blocks
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    return {"pinned": torch.cuda.host_memory_stats().get("allocated_bytes.current")}


def add_routes(_, app: FastAPI) -> None:
    @app.post("/sfast-scenes/memory")
    def memory():
        gc.collect()
        gpu = 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            gpu = torch.cuda.memory_allocated()
        before = taken()
        try:
            # what the C library keeps of freed memory is another amount each time
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):
            pass
        kept = taken()
        if kept is None:
            return {"gpu": gpu, "system": None}
        # of system memory, what tensors take that somebody refers to
        found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        storages = [x.untyped_storage() for x in found if x.device.type == "cpu" and x.layout is torch.strided]
        tensors = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        told = {"gpu": gpu, "system": sum(kept.values()), "tensors": tensors, **kept}
        told["trimmed"] = sum(before.values()) - sum(kept.values())
        return told | in_use() | mapped() | pinned()


script_callbacks.on_app_started(add_routes)
"""
"""An extension's script. System memory is that of Linux; None elsewhere."""
MB = 1 << 20
SLACK = {"gpu": 128 * MB, "system": 384 * MB}
"""Bytes by which a WebUI at rest may grow. A copy of SD 1.5's UNet has 1640 MB in half precision and 820 in 8 bits, a
CUDA graph of small images some tens. What a WebUI caches of prompts and LoRAs by itself is less."""
RETURNS = {"gpu": 128 * MB, "system": 1024 * MB}
"""Bytes by which it may be above its start, when it had made one image alone: kernels and libraries that the first
plans load stay."""
WHAT = {"gpu": "GPU memory", "system": "system memory"}


def add_route(data: Any) -> None:
    """Have the WebUI with this data directory answer what it holds."""
    add_extension(data, "scene-memory", SCRIPT)


def asked(webui: WebUI) -> dict[str, Any]:
    """What the WebUI holds now."""
    found: dict[str, Any] = webui.post("/sfast-scenes/memory", {})
    return found


def faults(held: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the memory of a WebUI at rest.

    Args:
        held: at the "start", after the "first" scenes and at the "end", as far as it was asked.
    """
    found = []
    end = held.get("end", {})
    for since, slack in (("first", SLACK), ("start", RETURNS)):
        before = held.get(since, {})
        for kind, most in slack.items():
            was, now = before.get(kind), end.get(kind)
            if was is not None and now is not None and now - was > most:
                after = {"first": "the first scenes", "start": "its start"}[since]
                found.append(f"{WHAT[kind]} at rest: {(now - was) // MB} MB more at the end than after {after}")
    return found


@dataclass
class Resident:
    """Tells which images were made by plans whose half-precision weights are in system memory."""

    seen: float = 0.0

    def ran(self, status: dict[str, Any]) -> bool:
        """Whether such a plan ran since the status before."""
        plans = [plan for each in status["accelerators"] for plan in each["plans"]]
        latest = max((plan["used_at"] or 0.0 for plan in plans if plan.get("resident")), default=0.0)
        before, self.seen = self.seen, max(self.seen, latest)
        return latest > before
