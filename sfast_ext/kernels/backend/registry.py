"""The kernel protocol: one record per kernel file, which declares it and registers it when it is imported.

Passes, memory estimates, size prediction and benchmarks read the record of what a node calls (`of`). Tests iterate over
all records (`sfast_ext.kernels.registered`): tests/kernels/test_registry.py names what a new kernel lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, eq=False)
class Kernel:
    """A fused operation.

    Args:
        name: the name of its file.
        reference: the operation in plain PyTorch: the oracle of tests, and what `launch` does where nothing else can.
        launch: what nodes of a rewritten graph call, with the same arguments.
        fallback: the operation by PyTorch's or the libraries' kernels, called where `launch` is not applicable.
        workspace: bytes that `launch` holds while it runs, beside its result, for its arguments.
        writes: position of the argument whose memory the result takes; None where results are memory of their own.
        flop_reference: a function of the same arguments with the FLOPs of `launch`, where `reference` has more.
        needs_triton: whether `launch` needs Triton, or all of `cuda_sources` in its place.
        portable: whether `cuda_sources` run on any card and are all that `launch` needs.
        any_source: whether one of `cuda_sources` is enough in Triton's place.
        uses: kernels that `launch` may call.
        triton_functions: what `launch` launches in Triton, `uses` aside.
        cuda_sources: what `launch` launches in CUDA C++ (`nvrtc.Source`), `uses` aside.
    """

    name: str
    reference: Callable[..., Any]
    launch: Callable[..., Any]
    fallback: Callable[..., Any] | None = None
    workspace: Callable[..., int] | None = None
    writes: int | None = None
    flop_reference: Callable[..., Any] | None = None
    needs_triton: bool = True
    portable: bool = False
    any_source: bool = False
    uses: tuple[Kernel, ...] = ()
    triton_functions: tuple[Any, ...] = ()
    cuda_sources: tuple[Any, ...] = ()


_by_module: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Make a kernel known; called once by its file, with `launch` of that file.

    Raises:
        ValueError: the file has a kernel, or another file's kernel has the name.
    """
    home = kernel.launch.__module__
    if home in _by_module or any(known.name == kernel.name for known in _by_module.values()):
        raise ValueError(f"a kernel {kernel.name!r} of {home} is registered already")
    _by_module[home] = kernel
    return kernel


def of(target: Any) -> Kernel | None:
    """The kernel whose file defines a function, such as a node's target, or is a module; a kernel itself; None for any
    other."""
    if isinstance(target, Kernel):
        return target
    home = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", None)
    return _by_module.get(home or "")


def known() -> dict[str, Kernel]:
    """The kernels registered so far, by name."""
    return {kernel.name: kernel for kernel in _by_module.values()}
