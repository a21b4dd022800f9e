"""Verification of a new plan on the user's own inputs: accuracy and speed.

A plan computes the same sums in another order, and rounds some values less often. Both results are correct. How far two
correct results are apart depends on the model, the input and the dtype: 1e-6 to 0.02. So it is measured, on the input
in question: the original forward runs again, and each value that an operation makes is rounded to fewer bits.

bfloat16 keeps 8 bits. After some 60 layers two correct results may differ by more than the tolerance, each within it of
the exact one. They are compared with a run in float32, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext import fp32_precision, reasons
from sfast_ext.call_signature import flatten_output
from sfast_ext.config import Config
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.plans.plan import Plan
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import Reason
from sfast_ext.report import at, logger
from sfast_ext.timing import Stopwatch, timer

TIMED_RUNS = 3
"""Measurements, of which the median is taken."""
TIMING_NOISE = 1.03
"""A replay counts as slower only above this ratio to the original."""
CLEARLY_FASTER = 1.5
"""Above this ratio no more than `quickest` is needed."""
LONG_MS = 100.0
"""A run that takes longer hides what else the CPU does."""
NOISE_OF_ONE = 1.1
"""As `TIMING_NOISE`, of one run of each."""
MAX_BY_ROUNDING = 4
"""Times the tolerance: bfloat16 rounds 8 times as coarsely as float16, and errors of two results add up."""
MAX_OF_ORIGINAL = 1.1
"""So many times as far from float32 as the original a plan may be."""
MAX_OF_KNOWN = 1.5
"""Other inputs may round a little worse than those of a plan that was found to differ by rounding: by so much."""
MAX_NOISE = 1.25
"""Of what rounding to fewer bits moves a result by: correct plans are 0.05 to 0.7 of it away (docs/measurements.md)."""
MAX_OF_ROUNDED_INPUTS = 8
"""Times the tolerance: products that round their inputs to 8 bits make so much of a last bit, see `Plan.rounds_inputs`.
A last bit of its input moved the results of such nets by 0.02 to 0.09, relative to their norm."""
BUDGET = 2.0
"""Times the tolerance: so far from the original a plan with 8-bit integers may be. Each product is about 1 % off.
Errors of layers are independent, and the residual stream adds what they make to what is exact."""
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Differences of so much are rounding in any model of more than a few layers, and are not measured."""
_fp16_accumulation = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: False)

_INTEGERS = {
    **dict.fromkeys((torch.bfloat16, torch.float16), torch.int16),
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_BITS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 3, torch.float64: 3}
"""Bits that are given up. Products in half precision are summed up in float32, and rounded once. In float32 the order
of a sum of thousands of products costs a few bits."""
_TF32_BITS = 13
"""TF32 has 10 bits of the 23."""
_FEW = 1 << 22
"""Values of a result that the CPU compares. SDXL's VAE has 3 million at 1024x1024."""
_CHUNK = 1 << 22
"""Elements that are rounded at once: so little memory is enough."""


@dataclass(frozen=True)
class Verification:
    """A new plan, and the original's run on the inputs that it is checked and timed with."""

    plan: Plan
    config: Config
    run: Callable[[], list[torch.Tensor]]
    """Runs the plan as it will be run later, by CUDA graph if possible."""
    run_original: Callable[[], Any]
    """Runs the original forward on the same inputs."""
    result: Any
    """The original forward's result for them."""
    original_s: float
    """The time of that run in seconds."""
    watch: Stopwatch | None = None
    """Timed that run. The plan is then timed by its first use, see `too_slow`, not here."""
    exact: Callable[[], list[torch.Tensor] | None] = lambda: None
    """The outputs in float32; None if they cannot be had. Asked if bfloat16 differs too much."""
    record: Callable[[], None] = lambda: None
    """Records the plan's launches, before it is timed. Not called if the original takes so long that the GPU hides the
    CPU's time."""


def verify_plan(new: Verification) -> Reason | None:
    """Check and time a new plan.

    Returns:
        The reason to reject the plan, or None.
    """
    plan, config = new.plan, new.config
    references = flatten_output(new.result)[1]
    # a result without finite values cannot be compared; the plan is compared at a later call
    checked = config.check != "never" and comparable(references)
    at("first run")
    outputs = new.run()
    if checked:
        at("check")
        refusal = Comparison(plan, outputs, references, config, new.run_original, new.exact).difference()
        if refusal is not None:
            return refusal
    at("timing")
    if new.watch is not None:
        plan.ms_before = new.watch.milliseconds() or None
        if plan.ms_before is not None and plan.ms_before < LONG_MS:
            new.record()
        return None
    run, original, device = new.run, new.run_original, plan.device
    if device.type != "cuda":
        # original_s is of one run: a coarse clock may not have moved
        plan.ms_before, plan.ms_after = 1000 * new.original_s or None, milliseconds(run, device, 1)
        return None
    new.record()
    if plan.resident:
        # the original would move the weights back, and take their memory
        plan.ms_after = quickest(run, device)
        return None
    # new calls: the first ones included warm-up
    plan.ms_after, plan.ms_before = quickest(run, device), quickest(original, device)
    if plan.ms_before < CLEARLY_FASTER * plan.ms_after:
        plan.ms_after, plan.ms_before = milliseconds(run, device), milliseconds(original, device)
    return too_slow(plan, config, TIMING_NOISE)


def tolerance(plan: Plan, config: Config) -> float:
    """How far a plan may be from the original in any case."""
    return BUDGET * config.tolerance if plan.banks else config.tolerance


def most_of(plan: Plan, config: Config) -> float:
    """How far a plan may be from the original: what its rounded inputs explain, as far as that was measured, or the
    tolerance."""
    moved, limit = max(plan.noise or [0.0]), tolerance(plan, config)
    if not plan.rounds_inputs or not math.isfinite(moved):
        return limit
    return max(limit, min(MAX_OF_ROUNDED_INPUTS * limit, MAX_NOISE * moved))


def excess(plan: Plan, config: Config) -> float:
    """By how many times a plan is further from the original than it may be; infinity if that is not known."""
    limit = tolerance(plan, config)
    return math.inf if plan.error is None or not limit else plan.error / limit


def too_slow(plan: Plan, config: Config, noise: float) -> Reason | None:
    """The reason to drop a plan that measured slower than the original, beyond so much noise; None if it did not."""
    after, before = plan.ms_after, plan.ms_before
    if not config.drop_slower or after is None or before is None or after <= noise * before:
        return None
    return reasons.SLOWER(after, before)


@dataclass(frozen=True)
class Comparison:
    """The results of a plan and the original's.

    Each result may differ as far as another rounding moves it on this input, and by no more than the
    tolerance. That is measured only if the difference is above what any model shows.
    """

    plan: Plan
    outputs: Sequence[torch.Tensor]
    references: Sequence[torch.Tensor]
    config: Config
    run_original: Callable[[], Any]
    """Runs the original forward on the same inputs."""
    exact: Callable[[], list[torch.Tensor] | None] = lambda: None
    """See `Verification.exact`."""

    def difference(self) -> Reason | None:
        """The reason to reject the plan, or None. Sets `plan.error`."""
        plan, tolerance = self.plan, self._tolerance
        errors = relative_errors(self.outputs, self.references)
        error, known = max(errors, default=0.0), plan.rounding_error
        # how far bfloat16 moves this plan's results was found out before
        most = tolerance if known is None else max(tolerance, MAX_OF_KNOWN * known)
        if plan.rounds_inputs and not error <= most:
            self._explained(errors)
            most = max(most, most_of(plan, self.config))
        over = not error <= most
        if known is None or over:
            plan.error = error
        if over and (known is not None or not self._may_be_rounding(error)):
            return reasons.INACCURATE(error, tolerance)
        if not self._sums_in_half() and not plan.banks:
            beyond = [(e, limit) for e, limit in zip(errors, self._explained(errors)) if not e <= limit]
            if beyond:
                plan.error, limit = max(beyond)
                return reasons.UNEXPLAINED(plan.error, limit)
        if over and not self._is_rounding():
            return reasons.INACCURATE(error, tolerance)
        return None

    @property
    def _tolerance(self) -> float:
        return tolerance(self.plan, self.config)

    def _explained(self, errors: Sequence[float]) -> list[float]:
        """How far each result may be from the original's because of rounding. Infinite if that cannot be measured."""
        plan, references = self.plan, self.references
        floors = [FLOORS.get(r.dtype, 0.0) for r in references]
        allowed = _allowed(floors, plan.noise)
        if all(e <= limit for e, limit in zip(errors, allowed)):
            return allowed
        moved = rounded_otherwise(self.run_original)
        # if it cannot be measured, the tolerance alone is the limit
        if moved is None or len(moved) != len(references):
            plan.noise = [math.inf] * len(references)
        else:
            plan.noise = relative_errors(moved, references)
        return _allowed(floors, plan.noise)

    def _sums_in_half(self) -> bool:
        """Whether sums may be in half precision, in the plan or in the original alone. How far that moves a result is
        not measured: the tolerance is the limit."""
        device = self.plan.device
        if device.type != "cuda":
            return False
        return bool(_fp16_accumulation()) or (self.config.faster_sums and mma_gemm.half_sums_profitable(device))

    def _may_be_rounding(self, error: float) -> bool:
        """Whether results that are further apart than the tolerance may differ because bfloat16 rounds."""
        in_bfloat16 = all(r.dtype == torch.bfloat16 for r in self.references)
        return in_bfloat16 and error <= MAX_BY_ROUNDING * self._tolerance

    def _is_rounding(self) -> bool:
        """Whether the plan and the original differ because bfloat16 rounds: both are as near to the result in float32
        as the tolerance asks, or the original is further from it, and the plan no further than that, up to a tenth.
        Sets `plan.error` to the plan's distance from float32."""
        plan, tolerance = self.plan, self._tolerance
        error, wanted = plan.error, self.exact()
        if wanted is None:
            return False
        ours, theirs = (relative_error([x.float() for x in r], wanted) for r in (self.outputs, self.references))
        if not theirs <= MAX_BY_ROUNDING * tolerance or not ours <= max(tolerance, MAX_OF_ORIGINAL * theirs):
            return False
        plan.error, plan.rounding_error = ours, error
        return True


def _allowed(floors: Sequence[float], noise: Sequence[float] | None) -> list[float]:
    return list(floors) if noise is None else [max(floor, MAX_NOISE * n) for floor, n in zip(floors, noise)]


def rounded_otherwise(run: Callable[[], Any]) -> list[torch.Tensor] | None:
    """The tensors of a forward's result if each operation gives up bits. None if it cannot run so: memory is short, or
    it does not run under a mode of torch."""
    try:
        with torch.no_grad(), _GivingUpBits():
            result = run()
        return flatten_output(result)[1]
    except Interrupted:
        raise
    except Exception:
        logger.debug("what rounding moves a result by could not be measured", exc_info=True)
        return None


class _GivingUpBits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is None:
            return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        given: set[int] | None = None
        for value, declared in zip(results, schema.returns):
            if type(value) is not torch.Tensor or value.dtype not in _INTEGERS or declared.alias_info is not None:
                continue
            if value.layout is not torch.strided:
                continue
            if given is None:
                given = set(_memory((args, kwargs)))
            # without an input it is a constant. Some operations return an input although their schema does not say so.
            if given and value.untyped_storage()._cdata not in given:
                _give_up(value)
        return result


def _memory(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value.untyped_storage()._cdata
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _memory(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _memory(each)


def _give_up(x: torch.Tensor) -> None:
    """Round to fewer bits, half to even. In place: the value is new. Zero, infinity and what has few bits stay."""
    bits = _bits(x)
    half, mask = (1 << (bits - 1)) - 1, -(1 << bits)
    for part in _parts(x):
        integers = part.view(_INTEGERS[x.dtype])
        up = (integers >> bits).bitwise_and_(1)
        integers.add_(up.add_(half) if half else up).bitwise_and_(mask)


def _bits(x: torch.Tensor) -> int:
    return _TF32_BITS if x.dtype is torch.float32 and x.is_cuda and _in_tf32() else _BITS[x.dtype]


def _in_tf32() -> bool:
    return fp32_precision.matmul_in_tf32() or fp32_precision.read_conv() in (True, "tf32")


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.numel() <= _CHUNK:
        return (x,)
    if x.is_contiguous():
        return x.view(-1).split(_CHUNK)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).view(-1).split(_CHUNK)
    return x.unbind(0)


def relative_error(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest of `relative_errors`."""
    return max(relative_errors(outputs, references), default=0.0)


def relative_errors(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> list[float]:
    """The relative L2 error of each of a list of tensors, in fp32.

    Infinite if shapes or dtypes differ, or if a value is not finite where the reference is. Values where the reference
    is not finite are ignored.
    """
    if len(outputs) != len(references):
        return [math.inf]
    return [_relative_error(output, reference) for output, reference in zip(outputs, references)]


def _relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return math.inf
    output, reference = _near(output), _near(reference)
    if not reference.is_floating_point():
        return 0.0 if torch.equal(output, reference) else math.inf
    ours, theirs = output.float(), reference.float()
    finite = torch.isfinite(theirs)
    if not bool(torch.isfinite(ours[finite]).all()):
        return math.inf
    zero = theirs.new_zeros(())
    theirs = torch.where(finite, theirs, zero)
    distance, norm = _norm(torch.where(finite, ours, zero) - theirs), _norm(theirs)
    return distance / norm if norm > 0 else distance


def _near(result: torch.Tensor) -> torch.Tensor:
    """On the CPU if it is small: a GPU's kernels for this take up to 50 MB of system memory for each operation."""
    return result.cpu() if result.numel() <= _FEW else result


def _norm(values: torch.Tensor) -> float:
    # float64: squares of float32 overflow from 2e19 on, and the ratio of two infinite norms is no error
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def comparable(references: Sequence[torch.Tensor]) -> bool:
    """Whether any value can be compared: a model may return NaN only."""
    return any(not r.is_floating_point() or bool(torch.isfinite(_near(r)).any()) for r in references)


def quickest(run: Callable[[], Any], device: torch.device) -> float:
    """The time of a call, by the shortest of a few unless one takes long: the first after a plan was built can take the
    CPU twice as long as the next."""
    taken = [milliseconds(run, device, 1)]
    while len(taken) < TIMED_RUNS and sum(taken) < LONG_MS:
        taken.append(milliseconds(run, device, 1))
    return min(taken)


def milliseconds(run: Callable[[], Any], device: torch.device, times: int = TIMED_RUNS) -> float:
    """The median time of a call. On a GPU by events, which synchronizes; on a CPU by `timing.timer`."""
    if device.type != "cuda":
        return sorted(timer.milliseconds(run) for _ in range(times))[times // 2]
    taken = []
    for _ in range(times):
        watch = Stopwatch(device)
        run()
        watch.stop()
        taken.append(watch.milliseconds())
    return sorted(taken)[len(taken) // 2]
