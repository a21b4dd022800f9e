"""Copies a call's inputs to the static inputs of its CUDA graph, with one kernel: csrc/copies.cu.

The kernel is the graph's first node, whose parameters are updated with the sources' addresses before each replay. If
torch does not hand out its graphs, it is launched by itself. Host time for three tensors, with an NVIDIA H200: 40
microseconds with torch's copies, 15 with such a launch, 5 with an update of the node. Without NVRTC torch copies one
tensor after another.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.cuda_driver import CU_GRAPH_NODE_TYPE_KERNEL, CUDA_KERNEL_NODE_PARAMS, Driver
from sfast_ext.kernels.backend.triton_runtime import INTERPRETED

logger = logging.getLogger("sfast_ext")

_MAX_TENSORS = 16  # tensors
_MAX_BYTES = 1 << 22  # bytes of a tensor: torch's copy uses more blocks for larger ones
_BLOCKS, _THREADS = 32, 256
# an entry of the kernel's table: (to, from, bytes)
_ENTRY, _FROM, _BYTES = 3, 1, 2


class Copies:
    """Copies to the same target tensors, again and again.

    Args:
        targets: tensors of one device.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        self._index = targets[0].get_device() if targets else -1
        some = [t.is_contiguous() and 0 < t.nbytes <= _MAX_BYTES for t in self._targets[:_MAX_TENSORS]]
        self._kinds = [(t.dtype, t.nbytes) if fits else None for t, fits in zip(self._targets, some)]
        self._table = (ctypes.c_longlong * (_ENTRY * _MAX_TENSORS))()
        for i, target in enumerate(self._targets[: len(self._kinds)]):
            self._table[_ENTRY * i] = target.data_ptr()
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._table))
        self._function = self._found() if self._index >= 0 and any(some) and not INTERPRETED else None
        self._tell_node: Callable[[], Any] | None = None

    def _found(self) -> Any:
        with torch.cuda.device(self._index):
            try:
                return _SOURCE.warmup(CAPACITY=_MAX_TENSORS) if _SOURCE.supported(self._targets[0].device) else None
            except nvrtc.Unavailable:
                return None  # logged

    def __call__(self, sources: Sequence[Tensor | None]) -> None:
        """Copy each source to its target, of the same shape: now on the current stream, or at the next replay of the
        graph after `join`. If a source is None the target stays as it is.

        Raises:
            Unavailable: the graph's node cannot be updated, and a replay would use the previous sources.
        """
        taken: list[int] = []
        node = self._tell_node
        ours = self._function is not None and (node is not None or torch.cuda.current_device() == self._index)
        table, kinds, index = self._table, self._kinds, self._index
        for i, source in enumerate(sources):
            kind = kinds[i] if ours and i < len(kinds) else None
            if kind is not None and source is not None and _alike(source, kind, index):
                table[_ENTRY * i + _FROM] = source.data_ptr()
                table[_ENTRY * i + _BYTES] = kind[1]
                taken.append(i)
                continue
            if kind is not None:
                table[_ENTRY * i + _BYTES] = 0
            if source is not None:
                self._targets[i].copy_(source, non_blocking=True)
        if node is not None:
            node()
        elif taken:
            try:
                self._launch()
            except nvrtc.Unavailable as exc:
                logger.warning("copies.cu is not used any more: %s", exc)
                self._function = None
                for i in taken:
                    self._targets[i].copy_(sources[i], non_blocking=True)  # type: ignore[arg-type]

    def _launch(self) -> None:
        nvrtc.bind(self._index)
        stream, table = nvrtc.current_stream(self._index), ctypes.addressof(self._arguments)
        grid, block = (_BLOCKS, len(self._kinds), 1), (_THREADS, 1, 1)
        assert self._function is not None
        nvrtc.loaded_driver().cuLaunchKernel(self._function, grid, block, 0, stream, table)

    def begin(self) -> None:
        """Launch, to be captured as the first node of a graph; it copies nothing until it is updated."""
        if self._function is None:
            return
        for i in range(len(self._kinds)):
            self._table[_ENTRY * i + _BYTES] = 0
        try:
            self._launch()
        except nvrtc.Unavailable as exc:
            logger.warning("copies.cu is not used any more: %s", exc)
            self._function = None

    def join(self, graph: int, executable: int) -> None:
        """Let the first node of a graph copy from now on.

        Args:
            graph: handle of the graph in which `begin` was captured.
            executable: handle of its instance.
        """
        if self._function is None:
            return
        try:
            driver = nvrtc.loaded_driver()
            node, params = self._node(driver, graph)
            params.kernelParams, params.extra = ctypes.addressof(self._arguments), None
        except Exception as exc:
            logger.debug("copies are launched by themselves: %s", exc)
            return
        tell = driver.cuGraphExecKernelNodeSetParams
        self._tell_node = lambda: tell(executable, node, params)

    def _node(self, driver: Driver, graph: int) -> tuple[int, CUDA_KERNEL_NODE_PARAMS]:
        """The root node of a graph that `begin` made, and its parameters."""
        for node in driver.cuGraphGetRootNodes(graph):
            if driver.cuGraphNodeGetType(node) == CU_GRAPH_NODE_TYPE_KERNEL:
                params = driver.cuGraphKernelNodeGetParams(node)
                if params.func == self._function:
                    return node, params
        raise nvrtc.Unavailable("the graph has no such node")


def _alike(source: Tensor, kind: tuple[torch.dtype, int], index: int) -> bool:
    """Whether a source has its target's device, dtype and size, and dense memory."""
    plain = type(source) is Tensor and source.get_device() == index and (source.dtype, source.nbytes) == kind
    return plain and source.is_contiguous() and not source.is_neg()


_SOURCE = nvrtc.Source("copies", lambda *args, **constants: ([], _THREADS, 0), ("copies",), reads_before_wait=None)
