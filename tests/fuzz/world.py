"""A model under an accelerator, and its twin that has none. Whatever happens to the one happens to the other, and
after each event both must compute the same."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fuzz import ground
from fuzz.compare import Wrong, compare_banks, compare_modules, places
from fuzz.ground import Ground
from fuzz.nets import Request, arguments, make, move
from sfast_ext import Accelerator, Hooks, accelerate
from sfast_ext.call_signature import flatten_output
from sfast_ext.kernels.backend import health
from sfast_ext.runtime.verify import relative_error

# outputs of the last calls, watched for writes by later ones
KEPT = 3
# a state: a dispatch mode that changes products
PRODUCTS = "a dispatch mode on products"
# earlier requests that may be made again
REMEMBERED = 6
# why a call may go to the original although nothing that we know of keeps plans away
KNOWN = ("what the model computes changes again and again", "an argument changes at each step")


class World:
    """One model, its twin and what is in force: patches, settings, faults, the kind of call.

    Args:
        kind: see `nets.make`.
        seed: of all inputs.
        on: the device, and what holds on it.
    """

    def __init__(self, kind: str, seed: int, on: Ground = ground.CPU) -> None:
        self.rng = random.Random(seed)
        self.kind, self.seed, self.ground = kind, seed, on
        self.twin = make(kind, 0)
        move(self.twin, on.device)
        nn.Module.to(self.twin, on.first)
        self.subject = copy.deepcopy(self.twin)
        self.request = Request(16, 16) if kind == "tokens" else Request()
        self.requests: list[Request] = []
        """Those made last; the latest is the last."""
        self.dtype = on.first
        self.mode = "no_grad"
        self.stream: torch.cuda.Stream | None = None
        """What calls are made on, if it is not the current one."""
        self.config = on.calm
        self.patches: dict[str, Callable[[], None]] = {}
        """What is patched now, and how it is taken away."""
        self.closure: dict[str, Any] = {}
        """What the patch of a class keeps for itself."""
        self.factor = 1.0
        """Of the function that takes the place of one of torch's."""
        self.foreign: set[str] = set()
        """Those of them that no plan can live with."""
        self.faults: list[Callable[[], None]] = []
        """Failures in force: each is ended by its call."""
        self.wrongs: list[str] = []
        """What was seen to go wrong at a place in which nothing could be raised."""
        self.values: dict[str, Any] = {}
        """Generated values in force, see `value_events`."""
        self.more: dict[str, Any] = {}
        """Arguments that each call has in addition to the request's."""
        self.watched: dict[str, Callable[[], None]] = {}
        """What raises `Wrong` after a call if the model left another state than its twin."""
        self.states: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}
        """States of torch that calls are made in, see `state_events`."""
        self.ticks = False
        self.laid_out: set[int] = set()
        """The dimensions of weights whose layout the host chose: if the arena had chosen the same before, nobody
        can tell afterwards."""
        self.done: list[str] = []
        """The events so far, as they are played again."""
        self.plan_runs = 0
        self.eight_bits = 0
        """Weights in 8 bits that were held against the twin's."""
        self.calls = 0
        self.raised = 0
        """Calls that raised, of the model and of its twin alike."""
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reports: list[Any] = []
        self.acc: Accelerator
        self.put_on()

    def put_on(self) -> None:
        """A new accelerator."""
        vouch = lambda module, kind, function: getattr(function, "vouched", False)
        self.acc = accelerate(self.subject, self.config, hooks=Hooks(recognised=vouch))
        if self.seed % 4:
            # most capture whatever changed: behaviours last for a few calls here
            self.acc._backoff.max_unused = 1_000_000
        self.reports.append(self.acc.report)
        self.ticks = False

    def again(self) -> str:
        """The command that plays all of it again."""
        more = " --eight-bits" if self.ground.eight_bits else ""
        return f"python -m fuzz --device {self.ground.name}{more} --play {self.kind}:{self.seed} " + " ".join(self.done)

    def counter(self, name: str) -> int:
        """A counter of the report, over all accelerators there were."""
        return sum(report.counter(name) for report in self.reports)

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        """Do something to the model and to its twin."""
        with torch.no_grad():
            change(self.subject)
            change(self.twin)

    def pick(self, rng: random.Random, kinds: type | tuple[type, ...]) -> str:
        """The path of a random submodule of some kinds."""
        # a submodule under a patch of its own keeps the name it had
        return rng.choice([n for n, m in self.twin.named_modules() if n and type(m) in _tuple(kinds)])

    def behaves_otherwise(self) -> None:
        """To be called after a change: between generations, of which a host tells the next, or in the middle of one."""
        if self.ticks and self.rng.random() < 0.5:
            self.acc.new_generation()

    def is_calm(self) -> bool:
        """Whether plans are to run."""
        config = self.config
        return (
            config.enabled and (config.allow_cpu or self.ground.gpu) and config.tolerance > 1e-6
            and self.acc.installed() and not self.foreign and not self.faults and self.mode != "gradients"
            and not self.states
            and not any(_foreign_forward(m) for m in self.twin.modules() if m is not self.twin)
        )  # fmt: skip

    def check(self) -> None:
        """Calls until one ran on a plan that was there before; each must give what the twin gives.

        Raises:
            Wrong: it did not, or the report says that something went wrong which was not made to.
        """
        if self.request in self.requests:
            self.requests.remove(self.request)
        self.requests = [*self.requests, replace(self.request)][-REMEMBERED:]
        before, raised = self.acc.report.as_dict(), self.raised
        self._call()
        if self._call() or not self.is_calm():
            return
        # numbers that the forward looks at cost a second capture
        if self._call() or self._call() or self._call() or self.raised > raised:
            return
        after = self.acc.report.as_dict()
        reasons = [r for r, n in after["reasons_since_start"].items() if n > before["reasons_since_start"].get(r, 0)]
        half = self.mode == "autocast" or self.dtype in (torch.bfloat16, torch.float16)
        known = (*KNOWN, "differs from the original by 0.0") if half else KNOWN
        # a reason is counted under the numbers that it came with first; the last ones are among the latest
        if not any(k in reason for reason in (*reasons, *after["reasons"]) for k in known):
            raise Wrong(f"no plan ran, because of {reasons}; {[e['message'] for e in after['events'][-3:]]}")

    def draw(self) -> tuple[tuple, dict]:
        """The arguments of one call, with new values."""
        args, kwargs = arguments(self.request, self.rng, self.dtype, kind=self.kind, device=self.ground.device)
        return args, {**kwargs, **self.more}

    def call_both(self) -> tuple[Any, Any]:
        """The results of one call, or the exceptions it raised."""
        args, kwargs = self.draw()
        before = [leaf.clone() for leaf in _tensors((args, kwargs))]
        there = places(self.subject)
        with self.calling():
            ours = result(self.subject, args, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _tensors((args, kwargs)))):
            raise Wrong("an argument was written to")
        if there != places(self.subject):
            raise Wrong("a call exchanged a parameter, a buffer or a submodule")
        with self.calling():
            theirs = result(self.twin, args, kwargs)
        return ours, theirs

    def release(self) -> None:
        """Release; what is left must be what the twin is, and the very objects that were there.

        Raises:
            Wrong: it is not.
        """
        self.end_faults()
        there = places(self.subject)
        self.acc.release()
        if there != places(self.subject):
            raise Wrong("release exchanged a parameter, a buffer or a submodule")
        if self.acc.installed():
            raise Wrong("the forward was not given back")
        compare_modules(self.subject, self.twin, free_layouts=self.laid_out)
        # what was kept of earlier results is as near as those were
        self.compare(*self.call_both(), untouched=not self.watched)

    def finish(self) -> None:
        """The end: a release, and all patches taken off.

        Raises:
            Wrong: see `release`; or most calls raised, and nothing was compared.
        """
        try:
            self.release()
        finally:
            self.undo()
        if self.raised > self.calls / 2:
            raise Wrong(f"{self.raised} of {self.calls} calls raised: this tests nothing")

    def undo(self) -> None:
        """Take off what would outlive the models: patches of classes, failures."""
        for end in (*self.faults, *reversed(self.patches.values())):
            end()
        self.faults.clear()
        self.patches.clear()
        self.states.clear()

    def forget(self) -> None:
        """Let go of the models, for memory to be measured."""
        del self.subject, self.twin, self.acc
        self.kept.clear()
        gc.collect()

    def end_faults(self) -> None:
        """Take injected failures away, and what was refused because of them."""
        if not self.faults:
            return
        for end in self.faults:
            end()
        self.faults.clear()
        # as a user does who changes a setting: what was refused is tried again
        self.acc.configure(replace(self.config, max_graphs=1 + self.config.max_graphs))
        self.acc.configure(self.config)

    def drop_plans(self) -> None:
        """As a user does who changes what plans are built with, and changes it back."""
        self.acc.configure(replace(self.config, triton=not self.config.triton))
        self.acc.configure(self.config)

    def compare(self, ours: Any, theirs: Any, *, untouched: bool = False) -> None:
        """Hold two results against each other; `untouched` if no accelerator had a part in ours.

        An original that raises makes no fault of the same exception.

        Raises:
            Wrong: they differ, or an earlier result was written to.
        """
        if isinstance(theirs, Exception):
            if type(ours) is not type(theirs) or str(ours) != str(theirs):
                raise Wrong(f"the original gives {theirs!r}, accelerated {ours!r}")
            self.raised += 1
            return
        if isinstance(ours, Exception):
            raise Wrong(f"a call failed that would not have without us: {ours!r}") from ours
        (tree, mine), (expected_tree, expected) = flatten_output(ours), flatten_output(theirs)
        if tree != expected_tree:
            raise Wrong(f"the result is {tree}, not {expected_tree}")
        # weights that lie channels-last make the original's own convolutions answer in that layout
        alike = untouched and not self.laid_out
        if alike and [o.stride() for o in mine] != [o.stride() for o in expected]:
            raise Wrong("the result has other strides")
        if [o.is_inference() for o in mine] != [o.is_inference() for o in expected]:
            raise Wrong("the result is an inference tensor without us, or only with us")
        limits = self.ground.limits
        limit = max(limits[self.dtype], limits[self.ground.autocast] if self.mode == "autocast" else 0.0)
        # a GPU's libraries do not promise the same bits twice
        limit = 0.0 if alike and not self.ground.gpu else limit
        error = relative_error([o.detach() for o in mine], [o.detach() for o in expected])
        if not error <= limit:
            raise Wrong(f"the result differs by {error:.3g}; at most {limit:g} is allowed")
        for held, copy_of_it in self.kept:
            if not torch.equal(held, copy_of_it):
                raise Wrong("the result of an earlier call was written to")
        if self.mode != "inference":
            self.kept = [*self.kept, *((o.detach(), o.detach().clone()) for o in mine)][-KEPT:]

    def gradients(self) -> bool:
        """Whether calls are tracked for gradients: by their kind, or by a state that they are made in."""
        with self.calling():
            return torch.is_grad_enabled()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """The kind of call in force: gradients, autocast, the stream."""
        with contextlib.ExitStack() as stack:
            if self.mode == "inference":
                stack.enter_context(torch.inference_mode())
            elif self.mode == "gradients":
                stack.enter_context(torch.enable_grad())
            else:
                stack.enter_context(torch.no_grad())
            if self.mode == "autocast":
                stack.enter_context(torch.autocast(self.ground.device.type, dtype=self.ground.autocast))
            if self.stream is not None:
                stack.enter_context(on_stream(self.stream))
            for enter in self.states.values():
                stack.enter_context(enter())
            yield

    def _call(self) -> bool:
        """One call, compared; True if it ran on a plan."""
        runs, errors = self._runs(), self.acc.report.counter("errors")
        ours, theirs = self.call_both()
        self.calls += 1
        if self.acc.report.counter("errors") != errors and not self.faults and not health.disabled(self.ground.device):
            raise Wrong(f"an error of ours: {self.acc.report.as_dict()['last_error']['traceback']}")
        if self.wrongs:
            raise Wrong("; ".join(self.wrongs))
        self.compare(ours, theirs)
        if self.ground.eight_bits and self._runs() > runs:
            self.eight_bits += compare_banks(self.acc.plans.values(), self.subject, self.twin)
        for look in self.watched.values():
            look()
        ran = self._runs() > runs
        self.plan_runs += ran
        return ran

    def _runs(self) -> int:
        counter = self.acc.report.counter
        return counter("eager_runs") + counter("replays")


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """On a stream that begins after what was done before, and is waited for by what comes after."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def result(module: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """What a call gives, or the exception it raised."""
    try:
        return module(*args, **kwargs)
    except Exception as exc:
        return exc


def _foreign_forward(module: nn.Module) -> bool:
    # accelerate leaves the class's own forward, of the time when it came, on the instance
    forward = module.__dict__.get("forward")
    own = getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own and not getattr(forward, "vouched", False)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _tuple(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


Event = Callable[[World, random.Random], None]
