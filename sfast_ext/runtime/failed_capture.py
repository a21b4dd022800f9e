"""What torch leaves behind of a CUDA graph capture that could not be ended."""

from __future__ import annotations

from typing import Any

import torch

from sfast_ext.report import logger


def end_allocation(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """Take the allocator out of a failed capture, and give up what the capture holds of its pool.

    CUDAGraph.capture_end raises before it does so where the driver has called the capture off. From then on empty_cache
    raises in torch 2.1, and the pool is never freed in later versions. Does nothing where the capture was ended.

    Args:
        pool: the handle that was passed to capture_begin.
        stream: the stream of the capture.
    """
    index = device.index or 0
    with torch.cuda.stream(stream):
        if _ended_here(index, pool):
            torch._C._cuda_releasePool(index, pool)


def free_random_numbers(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Give the default generator back, which capture_end leaves in the capture where it raises.

    Before torch 2.4 every random number would raise from then on. A capture of nothing that ends gives it back. Later
    versions need nothing, as a capture gets a generator of its own there.
    """
    if hasattr(torch.Generator, "graphsafe_set_state"):
        return
    try:
        _capture_nothing(device, stream)
    except Exception:
        # what ended the capture is more than this
        logger.debug("the default generator may still be in the failed capture", exc_info=True)


def _capture_nothing(device: torch.device, stream: torch.cuda.Stream) -> None:
    one = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            one.zero_()  # torch warns of an empty graph
        finally:
            graph.capture_end()


def _ended_here(index: int, pool: Any) -> bool:
    """End the allocation on the current stream; false if that was done before."""
    # the second is its name before torch 2.8
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    end = end or getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    if end is None:
        return False
    try:
        end(index, pool)
        return True
    except RuntimeError:
        return False
    except TypeError:
        # torch 2.1 takes no pool, and counts one capture less whether there was one or not
        if not _in_capture():
            return False
    end(index)
    return True


def _in_capture() -> bool:
    """Whether the allocator believes so, in torch 2.1."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError as exc:
        return "captures_underway" in str(exc)
    return False
