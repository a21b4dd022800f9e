"""The kernel protocol: `Kernel`, made by the decorator `kernel` from a launch function.

A kernel is what a node of a rewritten graph calls, and is known by its identity: passes, memory estimates, size
prediction and benchmarks ask `isinstance(node.target, Kernel)`. Tests iterate over all kernels
(`sfast_ext.kernels.registered`): tests/kernels/test_registry.py names what a new kernel lacks.

Whether a kernel runs is asked in three steps. `Kernel.supported`: is it enabled on a device, and is what it needs
there? `accepts`, of its file: None, or the reason why it does not take some operands. `profitable`, of its file: is it
faster than the library at that size? A launch function raises `Declined` if not, and the kernel's fallback runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from sfast_ext.kernels.backend import health, launch_log, triton_runtime
from sfast_ext.kernels.backend.cuda_driver import Unavailable

Operands = ParamSpec("Operands")
Result = TypeVar("Result")
SLOWER = "the library is faster at this size"


class Declined(Exception):
    """A launch function does not take its operands; the message is the reason, the same for all sizes."""


def require(*reasons: str | None) -> None:
    """Raise `Declined` with the first reason that is not None."""
    for reason in reasons:
        if reason is not None:
            raise Declined(reason)


@dataclass(eq=False, repr=False)
class Kernel(Generic[Operands, Result]):
    """A fused operation, which is called like its launch function.

    Args:
        function: launches, or raises `Declined`; its file has the kernel's name.
        reference: the operation in plain PyTorch, with the same arguments: the oracle of tests.
        fallback: the operation by PyTorch's or the libraries' kernels, for operands that are declined; by default
            `reference`.
        workspace: bytes that the kernel holds while it runs, in addition to its result, for its arguments.
        writes: position of the argument whose memory the result takes, or of a list of those whose memory the results,
            a list as well, take; None if results have separate memory.
        updates: positions of further arguments, tensors or lists of them, that it writes to.
        flop_reference: a function of the same arguments with the FLOPs of the kernel, if `reference` has more.
        needs_triton: whether the kernel needs Triton, or all of `cuda_sources` in its place.
        portable: whether `cuda_sources` run on any card and are all that the kernel needs.
        any_source: whether one of `cuda_sources` is enough in Triton's place.
        uses: kernels that may be called by this one.
        triton_functions: what is launched in Triton, `uses` aside.
        cuda_sources: what is launched in CUDA C++ (`nvrtc.Source`), `uses` aside.
        part: whether it is launched by another kernel alone, and not registered.
    """

    function: Callable[Operands, Result]
    reference: Callable[..., Any]
    fallback: Callable[..., Any] | None = None
    workspace: Callable[..., int] | None = None
    writes: int | None = None
    updates: tuple[int, ...] = ()
    flop_reference: Callable[..., Any] | None = None
    needs_triton: bool = True
    portable: bool = False
    any_source: bool = False
    uses: tuple[Kernel[..., Any], ...] = ()
    triton_functions: tuple[Any, ...] = ()
    cuda_sources: tuple[Any, ...] = ()
    part: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)
        self.name = self.function.__module__.rpartition(".")[2]
        self.__dict__["__name__"] = self.name  # of nodes that call it

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __call__(self, *args: Operands.args, **kwargs: Operands.kwargs) -> Result:
        token = launch_log.kernel.set(self.name)
        try:
            try:
                return self.function(*args, **kwargs)
            except Declined as exc:
                self.count(exc)
            except Unavailable:
                if self.portable or self.part:
                    raise  # a portable kernel is disabled, and plans do without
                self.count("CUDA C++ does not compile or launch here")  # it is logged why
            return (self.fallback or self.reference)(*args, **kwargs)
        except Exception as exc:
            health.attribute(exc, self.name)
            raise
        finally:
            launch_log.kernel.reset(token)

    def count(self, reason: object) -> None:
        """Count a reason for which the kernel declined, see `declined`. Dry runs do not count."""
        if not triton_runtime.is_dry_run():
            _declined[self.name, str(reason)] += 1

    def __reduce__(self) -> str:
        """Copies and pickles are the kernel itself."""
        return self.function.__name__

    def supported(self, device: torch.device, *, triton: bool) -> bool:
        """Whether the kernel may be launched on a device: neither it nor one that it uses is disabled, and what it
        needs is there, which is Triton (`triton`) or, on a device that its sources run on, NVRTC."""
        # what has no function of Triton, and uses no kernel that has, cannot run by it
        triton = triton and not (self.portable and not self.triton_functions and not self.uses)
        return (triton or not self.needs_triton or self._compiles(device)) and self.enabled(device)

    def enabled(self, device: torch.device) -> bool:
        """Whether neither the kernel nor one that it uses is disabled on a device."""
        return health.reason(self.name, device) is None and all(used.enabled(device) for used in self.uses)

    def _compiles(self, device: torch.device) -> bool:
        there = [source.supported(device) for source in self.cuda_sources]
        return bool(there) and not triton_runtime.INTERPRETED and (any(there) if self.any_source else all(there))


_registered: dict[str, Kernel[..., Any]] = {}
_declined: Counter[tuple[str, str]] = Counter()


def kernel(
    reference: Callable[..., Any], **record: Any
) -> Callable[[Callable[Operands, Result]], Kernel[Operands, Result]]:
    """Make a launch function a kernel, and register it under the name of its file.

    Args:
        record: the other arguments of `Kernel`.

    Raises:
        ValueError: a kernel of that name is registered.
    """

    def decorate(function: Callable[Operands, Result]) -> Kernel[Operands, Result]:
        made = Kernel(function, reference, **record)
        if not made.part:
            if made.name in _registered:
                raise ValueError(f"a kernel {made.name!r} is registered already")
            _registered[made.name] = made
        return made

    return decorate


def registered() -> dict[str, Kernel[..., Any]]:
    """The kernels registered so far, by name."""
    return dict(_registered)


def of(target: Any) -> Kernel[..., Any] | None:
    """A node's target if it is a kernel, else None."""
    return target if isinstance(target, Kernel) else None


def declined() -> dict[str, dict[str, int]]:
    """How often kernels declined their operands in this process, by name and reason. They are asked when plans are
    made and launches are recorded; a replay asks none."""
    found: dict[str, dict[str, int]] = {}
    for (name, reason), count in sorted(_declined.items()):
        found.setdefault(name, {})[reason] = count
    return found
