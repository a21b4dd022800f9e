"""Why a call is not accelerated: a code, a template and values, made where the reason arises.

`Kind` is a row of a table, and makes reasons: `SLOWER(31.0, 14.8)`. This file has the rows of the core, and
`hosts/reasons.py` those of the hosts. The code of a row is its entry in docs/troubleshooting.md, which says what a user
can do about it. A report counts reasons, the badge and the help find their entry, and a page translates their pieces.
None of them reads the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

MAX_LENGTH = 500
"""The maximum length of a foreign text in characters."""
BREAK = "; "
"""Between what is the case and what to do about it."""

_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]+")
_BEFORE, _AFTER = " ,;:.()['", " ,;(['"


def one_line(text: str) -> str:
    """A foreign text as one line of bounded length, without addresses of objects."""
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 3] + "..."


class Private(str):
    """A value that names what belongs to the user. A bug report leaves it out."""


class Detail(str):
    """A value that does not tell reasons apart, such as the message of an exception."""


@dataclass(frozen=True)
class Reason:
    """Why something is not accelerated. Its text is a sentence for the user, without a full stop.

    Attributes:
        code: the entry of docs/troubleshooting.md.
        template: what is the case, with a place for each value, as of `str.format`.
        values: texts, numbers, and tuples of numbers (shapes).
        remedy: what to do about it, or "".
    """

    code: str
    template: str
    values: tuple[Any, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        return "".join(self.pieces())

    def pieces(self) -> list[str]:
        """The text in pieces: each value, and each part of the sentence between them, by itself. Put together they make
        the text. The remedy comes last, after `BREAK`."""
        found = list(self._of_template())
        if self.remedy:
            found += [BREAK, self.remedy]
        return [piece for piece in found if piece]

    def _of_template(self) -> Iterator[str]:
        values = iter(self.values)
        for words, field, form, _ in Formatter().parse(self.template):
            yield from _apart(words)
            if field is not None:
                yield _shown(next(values), form or "")

    def identity(self) -> tuple[Any, ...]:
        """What counts as the same reason: numbers and details may differ."""
        return self.code, self.template, self.remedy, *(None if _varies(v) else v for v in self.values)

    def of(self, what: str) -> Reason:
        """The same of one of several networks."""
        return replace(self, template="{}: " + self.template, values=(what, *self.values))

    def anonymous(self) -> Reason:
        """The same without names that belong to the user."""
        return replace(self, values=tuple("<name>" if isinstance(v, Private) else v for v in self.values))

    def as_dict(self) -> dict[str, Any]:
        """The reason as JSON has it."""
        values = [list(v) if isinstance(v, tuple) else v for v in self.values]
        return {"code": self.code, "text": str(self), "values": values}


@dataclass(frozen=True)
class Kind:
    """A row of a table of reasons. A call makes a reason; see `Reason`."""

    code: str
    template: str
    remedy: str = ""

    def __call__(self, *values: Any) -> Reason:
        """The reason with these values. Objects other than texts and numbers become text."""
        return Reason(self.code, self.template, tuple(map(_plain, values)), self.remedy)


class Declined(Exception):
    """Something is not done. `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        # code outside of this package may give a text
        self.reason = given(reason)
        super().__init__(str(self.reason))


def given(reason: Reason | str) -> Reason:
    """A reason as it is, and a text as one without a separate entry."""
    return reason if isinstance(reason, Reason) else OTHER(one_line(str(reason)))


def text(reason: Reason | None) -> str | None:
    """The text of a reason, if there is one."""
    return None if reason is None else str(reason)


def rows(table: Iterable[Any]) -> tuple[Kind, ...]:
    """The kinds of reasons among the values of a table."""
    return tuple(each for each in table if isinstance(each, Kind))


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        short = value.isprintable() and len(value) <= MAX_LENGTH
        return value if short else type(value)(" ".join(value.split())[:MAX_LENGTH])
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        return tuple(value)
    return one_line(str(value))


def _shown(value: Any, form: str) -> str:
    return format(list(value) if isinstance(value, tuple) else value, form)


def _varies(value: Any) -> bool:
    return not isinstance(value, str) or isinstance(value, Detail)


def _apart(words: str) -> tuple[str, ...]:
    """Words of a template, with the marks around them by themselves: a page translates the words."""
    inner = words.lstrip(_BEFORE).rstrip(_AFTER)
    if not inner:
        return (words,)
    before, _, after = words.partition(inner)
    return before, inner, after


# the table of the core: a row each
# fmt: off

OTHER = Kind("other", "{}")
FURTHER = Kind("many-reasons", "(further reasons)")

NO_GPU = Kind("no-gpu", "torch finds no NVIDIA GPU")
NOT_ON_GPU = Kind("no-gpu", "the model is on {}, not on a GPU")
ON_CPU = Kind("no-gpu", "the model is on the CPU, and running there is switched off")
ROCM = Kind("unsupported-gpu", "this torch is built for ROCm: NVIDIA GPUs alone are accelerated")
OLD_GPU = Kind("unsupported-gpu", "the GPU has compute capability {}: it takes {} or later")

OLD_FOR_EIGHT_BITS = Kind("eight-bits", "the GPU has compute capability {}, and they take {} or later")
NVRTC_FOR_EIGHT_BITS = Kind("eight-bits", "they take NVRTC, which cannot be used here ({})")

GRADIENTS = Kind("training", "gradients are being recorded")
MODE = Kind("torch-state", "{} is active around the call: it sees or changes each operation of torch")
JIT_TRACE = Kind("torch-state", "torch.jit.trace, or an export that uses it, records the call")
TRANSFORM = Kind("torch-state", "torch.func transforms the call, by {}")
FORWARD_MODE = Kind("torch-state", "derivatives are computed in forward mode")
NO_OVERRIDES = Kind("torch-state",
    "overrides of torch's functions are switched off around the call (DisableTorchFunction)")
PARAMETRIZE = Kind("torch-state", "torch.nn.utils.parametrize.cached keeps tensors of the call")
FX_TRACE = Kind("torch-state", "torch.fx records the call")
LIBRARY = Kind("torch-state", "torch.library replaces torch's own {}")
CAPTURES_GRAPH = Kind("torch-state", "the program captures a CUDA graph on the current stream")
CAPTURED_GRAPH = Kind("torch-state",
    "the program has captured a CUDA graph of the model, which reads the weights where they are")

FOREIGN_PATCH = Kind("another-extension", "{} has a foreign {}, {}")
TORCH_REPLACED = Kind("another-extension", "{} is replaced by {}")
TORCH_GONE = Kind("another-extension", "{} is gone")
FORWARD_OF_PART = Kind("another-extension", "{} is in place of the forward of {}")
UNKNOWN_VALUE = Kind("unknown-value", "the forward can read {}, a {} {}")

DICT_KEYS = Kind("arguments", "{} is a dict with keys that are neither text nor integers")
NO_INPUT = Kind("arguments", "{} is a {}, which an accelerated step cannot take as an input")
HAS_CODE = Kind("arguments", "among its arguments is a {}, whose class has code or values")
HAS_ATTRIBUTE = Kind("arguments", "{} has an attribute {}, which an accelerated step would not have")
NOT_PLAIN = Kind("arguments", "{} is a {} with layout {}, not a plain tensor")
ON_META = Kind("arguments", "{} is on the meta device")
ELSEWHERE = Kind("arguments", "{} is on {}, the model on {}")
SAME_LIST = Kind("arguments", "the same list is there twice among its arguments, and its forward changes it")
ONE_VALUE = Kind("arguments",
    "its image has one value in each channel, of which a norm of single channels makes rounding alone")
CHANGES_ARGUMENT = Kind("arguments", "its forward changes {}, one of its arguments")
ARGUMENT_CHANGES = Kind("changes-again",
    "an argument changes at each step, and its values cannot all be prepared: {}")
MODEL_CHANGES = Kind("changes-again",
    "what the model computes changes again and again: it is prepared when it stays the same")

NEW_KIND = Kind("new-size",
    "this size, number of images or length of the prompt is new: it is prepared when used again, or once that pays")

WEIGHTS_ON = Kind("weights-elsewhere", "the weights are on {}, what was prepared for them on {}")
WEIGHTS_SPLIT = Kind("weights-elsewhere", "some weights are on {}, others on {}")
WEIGHTS_GIVEN_BACK = Kind("weights-elsewhere", "the memory of the weights was given back to the host")
PLAN_DROPPED = Kind("weights-elsewhere", "another thread dropped what was prepared")
WEIGHTS_REPLACED = Kind("weights-elsewhere", "the weights were replaced while another thread ran the original forward")
WEIGHTS_IN_USE = Kind("weights-elsewhere", "another thread runs the original forward: its weights stay as they are")
WEIGHT_GONE = Kind("weights-changed", "{} is gone")
WEIGHT_CLASS = Kind("weights-changed", "{} is now a {}")
WEIGHT_FORM = Kind("weights-changed", "{} changed from {} to {}")
WEIGHT_FORMAT = Kind("weights-changed", "the memory format of {} changed")
WEIGHT_EXCHANGED = Kind("weights-changed", "the memory of {} was exchanged")
WEIGHT_SHARED = Kind("weights-changed", "the memory of {} is still in use by others")
WEIGHT_UNTIED = Kind("weights-changed", "{} is no longer shared between modules")
WEIGHT_TIED = Kind("weights-changed", "{} is now the tensor of {}")
WEIGHTS_RESTORED = Kind("weights-changed", "the weights were laid back while a size was prepared")

KEEPS_STATE = Kind("state", "its forward keeps state between calls, in {}")
WRITES_WEIGHT = Kind("state", "its forward writes to a weight or a buffer ({})")
WRITES_ARGUMENT = Kind("state", "its forward writes to one of its arguments ({})")
WRITES_PERHAPS = Kind("state", "its forward writes to what may be a weight or an argument ({})")
WRITES_TENSOR = Kind("state", "its forward writes to a tensor {} that is neither an argument nor a weight")
REPLACES_WEIGHT = Kind("state", "its forward replaces the data of a weight or a buffer ({})")
REPLACES_TENSOR = Kind("state", "its forward replaces the data of a tensor {} that it holds")
DRAWS = Kind("random-numbers", "its forward draws random numbers ({})")
DROPOUT = Kind("random-numbers", "{} is called with dropout, which draws random numbers")
READS_VALUE = Kind("depends-on-values", "its forward reads a value from the device, or depends on one{}")
READS_WEIGHT = Kind("depends-on-values", "its forward reads the value of a weight ({}) as a number")
READS_NUMBER = Kind("depends-on-values",
    "its forward reads a number from a tensor {} that is neither an argument nor a weight")
READS_TENSOR = Kind("depends-on-values", "its forward reads a tensor {} that is neither an argument nor a weight")
QUANTISED_LAYER = Kind("quantised", "the model is quantised: its layer {} by {}", "such layers are not accelerated")
CALLS_COMPILED = Kind("compiled", "its forward calls a function that torch.compile made{}")
NOT_RECORDED = Kind("cannot-be-recorded", "its forward cannot be recorded: {}{}")
OTHER_RESULT = Kind("cannot-be-recorded", "the result of its forward is another when it is recorded")
CALL_NOT_RECORDED = Kind("cannot-be-recorded", "{} cannot be recorded")
OPTION_NOT_RECORDED = Kind("cannot-be-recorded", "{} is called with {}, which cannot be recorded")
ARGUMENT_NOT_RECORDED = Kind("cannot-be-recorded", "an argument of {} is a {}")
DIMENSIONS = Kind("cannot-be-recorded", "{} is called with tensors of {} dimensions", "3 and 4 can be recorded")
BIAS_DTYPE = Kind("cannot-be-recorded", "{} is called with a bias a tensor of {}",
    "none, a tensor of floats and LowerTriangularMask can be recorded")
BIAS_CLASS = Kind("cannot-be-recorded", "{} is called with a bias of class {}", BIAS_DTYPE.remedy)

INACCURATE = Kind("different-image",
    "the accelerated step differs from the original by {:.2g}, more than the tolerance of {:g}")
UNEXPLAINED = Kind("different-image",
    "the accelerated step differs from the original by {:.2g}, more than rounding explains ({:.2g})")
SLOWER = Kind("slower", "the accelerated step is slower than the original ({:.1f} ms against {:.1f} ms)")
NO_ROOM = Kind("out-of-memory", "the GPU has too little memory left next to the model to prepare this size")
NO_ROOM_FOR_WEIGHTS = Kind("out-of-memory", "the GPU has no memory left for the weights as accelerated steps read them")
BUILD_NO_MEMORY = Kind("out-of-memory", "this size could not be prepared: {}: {}")
PLAN_NO_MEMORY = Kind("out-of-memory", "the accelerated step failed: {}: {}")
BUILD_FAILED = Kind("failed", "this size could not be prepared: {}: {}")
PLAN_FAILED = Kind("failed", "the accelerated step failed: {}: {}")

EIGHT_BITS_BFLOAT16 = Kind("eight-bits",
    "8 bits are not used: the model is in bfloat16, and the GPU of compute capability {} takes float16 alone")
EIGHT_BITS_KERNELS = Kind("eight-bits", "8 bits are not used: there are no kernels for them on {}")
EIGHT_BITS_KERNEL_FAILED = Kind("eight-bits", "8 bits are not used: a kernel for them failed: {}: {}")
EIGHT_BITS_FLOAT32 = Kind("eight-bits", "8 bits are not used: the model is in float32, and they are for half precision")
EIGHT_BITS_LAYERS = Kind("eight-bits", "8 bits are not used: at this size the model has no layer that is fit for them")
EIGHT_BITS_READ = Kind("eight-bits",
    "8 bits are not used: the weights of layers that are fit for them are read in half precision elsewhere")
EIGHT_BITS_ERRORS = Kind("eight-bits", "8 bits are not used: they would change each layer by more than {:.0%}")
EIGHT_BITS_NO_GAIN = Kind("eight-bits", "8 bits are not used: at this size they would not make this GPU faster")
EIGHT_BITS_SLOWER = Kind("eight-bits",
    "8 bits are not used: at this size a call takes {:.2f} ms with them and {:.2f} ms without")
EIGHT_BITS_VALUES = Kind("eight-bits", "8 bits are not used: values of this call are not finite")
EIGHT_BITS_ROOM = Kind("eight-bits", "8 bits are not used: the GPU has too little memory for a second copy of weights")
EIGHT_BITS_INACCURATE = Kind("eight-bits",
    "8 bits are not used: they change the result by {:.2g}, and {:g} is allowed")
EIGHT_BITS_SLOWER_THAN_ORIGINAL = Kind("eight-bits",
    "8 bits are not used: a call takes {:.1f} ms with them, and {:.1f} ms without this extension")
FITS_CARD = Kind("eight-bits", "{} fits this card in 8 bits, and need not be moved for each image",
    "choose the preset '8 bits (faster, details change)'")
BROUGHT_BACK = Kind("eight-bits", "{} half-precision weights are back on the GPU, as the original forward reads them")
STREAMS = Kind(
    "eight-bits",
    "the GPU has no room for half-precision weights that were in system memory: each step reads them from there, which "
    "takes longer, until there is room",
    "close other programs that use the GPU",
)
CROWDED = Kind(
    "eight-bits",
    "the GPU has no room for this image next to half-precision weights: until it is prepared, each step reads them "
    "from system memory, which takes longer",
    "choose a smaller size",
)
NOT_LEAN = Kind(
    "eight-bits", "half-precision weights come back for the first step of each size, as it failed without them: {}: {}"
)
EIGHT_BITS_REFUSED = Kind("eight-bits", "8 bits are not used: {}")
EIGHT_BITS_FAILED = Kind("eight-bits", "8 bits are not used: this size could not be prepared with them: {}: {}")

TABLE = rows(list(globals().values()))
