"""Repeats the launches of a run without the Python that decided on them.

Launch functions choose kernels, tiles and layouts by shapes, strides, alignment and the device. In a plan these are the
same at each run. Where no CUDA graph replays the launches, to decide again takes the CPU longer than small images take
the GPU. So a run is recorded once (`run_recorder`).

What a recording cannot know makes a run unrepeatable: a library that is called past torch's dispatcher, an operation
that writes to an input or a weight, a value that is read on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.runtime.interpreter import Interpreter
from sfast_ext.runtime.repetition import CannotRepeat
from sfast_ext.runtime.run_recorder import EMPTY, RunRecorder

_POISON = 0xFF  # of it all floats are NaN


class RecordedRun:
    """Repeats a run of a program while the inputs have the shapes, strides and alignment of those recorded.

    Not for several threads at a time. The device that is current when it is made must be so when it is called.

    Args:
        program: had a run before: what is compiled or measured at a first run is not recorded.
        inputs: of the run that is recorded.

    Raises:
        CannotRepeat: the run is not repeatable, or its repetition gives other bits.
    """

    def __init__(self, program: Interpreter, inputs: Sequence[Tensor]) -> None:
        self._program = program
        self._index = inputs[0].device.index
        recorder = RunRecorder([*inputs, *program.tensors()])
        with recorder.recording():
            result = list(program(*inputs))
        self._repetition = recorder.repetition(result)
        result = [x.cpu() for x in result]  # of a card's memory no more than a run takes
        # outputs that nothing wrote to would be those that the recorded run left there
        with _Poisoned():
            again = [x.cpu() for x in self(*inputs)]
        if not _same(again, result):
            raise CannotRepeat("the repetition differs")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The program's flat outputs."""
        values = self._repetition.values([*inputs, *self._program.tensors()])
        if values is None:
            return list(self._program(*inputs))
        return self._repetition.run(values, nvrtc.current_stream(self._index) if self._index is not None else 0)


class _Poisoned(TorchDispatchMode):
    """Within, new memory is filled with NaN."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in EMPTY and result.numel():
            size = result.untyped_storage().nbytes() // result.element_size()
            torch.as_strided(result, (size,), (1,), 0).view(torch.uint8).fill_(_POISON)
        return result


def _same(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return len(these) == len(those) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))
        for a, b in zip(these, those)
    )


def _bits(x: Tensor) -> Tensor:
    # NaN differs from itself
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()]) if x.element_size() in kinds else x
