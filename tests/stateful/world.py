"""A model under an accelerator, and its twin that has none. Whatever happens to the one happens to the other, and
after each event both must compute the same."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sfast_ext import Accelerator, Config, Hooks, accelerate
from sfast_ext.plan import relative_error
from sfast_ext.signature import flatten_output
from sfast_ext.slot import AcceleratedForward
from stateful.nets import Request, arguments, make

CPU = Config(allow_cpu=True)
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2}
# outputs of the last calls, watched for writes by later ones
KEPT = 3
# why a call may go to the original although nothing that we know of keeps plans away
KNOWN = ("what the model computes changes at every call",)


class Wrong(AssertionError):
    """The accelerated model and its twin differ."""


class World:
    """One model, its twin and what is in force: patches, settings, faults, the kind of call.

    Args:
        kind: see `nets.make`.
        seed: of the weights and of all inputs.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.twin = make(kind, 0)
        self.subject = copy.deepcopy(self.twin)
        self.request = Request()
        self.dtype = torch.float32
        self.mode = "no_grad"
        self.config = CPU
        self.patches: dict[str, Callable[[], None]] = {}
        """What is patched now, and how it is taken away."""
        self.foreign: set[str] = set()
        """Those of them that no plan can live with."""
        self.faults: list[Callable[[], None]] = []
        """Failures in force: each is ended by its call."""
        self.ticks = False
        self.laid_out = False
        """Whether the host chose a memory layout: where the arena chose the same before, nobody can tell afterwards."""
        self.plan_runs = 0
        self.calls = 0
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.acc: Accelerator
        self.put_on()

    def put_on(self) -> None:
        """A new accelerator."""
        vouch = lambda module, kind, function: getattr(function, "vouched", False)
        self.acc = accelerate(self.subject, self.config, hooks=Hooks(recognised=vouch))
        self.ticks = False

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
        """To be called after a change that a host tells by a new generation."""
        if self.ticks:
            self.acc.new_generation()

    def is_calm(self) -> bool:
        """Whether plans are to run."""
        config = self.config
        return (
            config.enabled and config.allow_cpu and config.tolerance > 1e-6 and self.acc.installed()
            and not self.foreign and not self.faults and self.mode != "gradients"
            and not any(_foreign_forward(m) for m in self.twin.modules() if m is not self.twin)
        )  # fmt: skip

    def check(self) -> None:
        """Calls until one ran on a plan that was there before; each must give what the twin gives.

        Raises:
            Wrong: it did not, or the report says that something went wrong which was not made to.
        """
        self._call()
        before = self.acc.report.counter("captures")
        if not self._call() and self.is_calm():
            # numbers that the forward looks at cost a second capture
            ran = self._call() or self._call()
            reason = self._last_reason()
            half = self.mode == "autocast" or self.dtype == torch.bfloat16
            known = (*KNOWN, "differs from the original by 0.0") if half else KNOWN
            if not ran and not any(k in reason for k in known):
                captured = self.acc.report.counter("captures") - before
                raise Wrong(f"no plan ran, {captured} captures; {reason or 'no reason given'}")

    def call_both(self) -> tuple[Any, Any]:
        """The results of one call, or the exceptions it raised."""
        args, kwargs = arguments(self.request, self.rng, self.dtype, unet=self.kind == "unet")
        before = [leaf.clone() for leaf in _tensors((args, kwargs))]
        places = _places(self.subject)
        with self._mode():
            ours, theirs = _result(self.subject, args, kwargs), _result(self.twin, args, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _tensors((args, kwargs)))):
            raise Wrong("an argument was written to")
        if places != _places(self.subject):
            raise Wrong("a call exchanged a parameter, a buffer or a submodule")
        return ours, theirs

    def finish(self) -> None:
        """Release; what is left must be what the twin is."""
        self.end_faults()
        self.acc.release()
        try:
            ours, theirs = self.call_both()
            if not isinstance(theirs, Exception):
                self._compare(ours, theirs, exactly=not self.laid_out)
            compare_modules(self.subject, self.twin, layouts=not self.laid_out)
        finally:
            for undo in reversed(list(self.patches.values())):
                undo()
            self.patches.clear()

    def end_faults(self) -> None:
        """Take injected failures away, and what was refused because of them."""
        if not self.faults:
            return
        for end in self.faults:
            end()
        self.faults.clear()
        self.forget_refusals()

    def forget_refusals(self) -> None:
        """As a user does who changes a setting: what was refused is tried again."""
        self.acc.configure(Config(allow_cpu=True, max_graphs=1 + self.config.max_graphs))
        self.acc.configure(self.config)

    def _call(self) -> bool:
        """One call, compared; True where it ran on a plan."""
        counter = self.acc.report.counter
        runs, errors = counter("eager_runs"), counter("errors")
        ours, theirs = self.call_both()
        self.calls += 1
        if isinstance(theirs, Exception) or isinstance(ours, Exception):
            raise Wrong(f"the original gives {theirs!r}, accelerated {ours!r}")
        if counter("errors") != errors and not self.faults:
            raise Wrong(f"an error of ours: {self.acc.report.as_dict()['last_error']['traceback']}")
        self._compare(_detached(ours), _detached(theirs))
        ran = counter("eager_runs") > runs
        self.plan_runs += ran
        return ran

    def _compare(self, ours: Any, theirs: Any, *, exactly: bool = False) -> None:
        if isinstance(ours, Exception):
            raise Wrong("a call failed that would not have without us") from ours
        (tree, mine), (expected_tree, expected) = flatten_output(ours), flatten_output(theirs)
        if tree != expected_tree:
            raise Wrong(f"the result is {tree}, not {expected_tree}")
        # weights that lie channels-last make the original's own convolutions answer in that layout
        if exactly and [o.stride() for o in mine] != [o.stride() for o in expected]:
            raise Wrong("the result has other strides")
        limit = LIMITS[torch.bfloat16] if self.mode == "autocast" else LIMITS[self.dtype]
        error = relative_error(mine, expected)
        if not error <= (0.0 if exactly else limit):
            raise Wrong(f"the result differs by {error:.3g}; at most {limit:g} is allowed")
        for held, copy_of_it in self.kept:
            if not torch.equal(held, copy_of_it):
                raise Wrong("the result of an earlier call was written to")
        if self.mode == "inference":
            return
        self.kept = [*self.kept, *((o.detach(), o.detach().clone()) for o in mine)][-KEPT:]

    def _last_reason(self) -> str:
        events = self.acc.report.as_dict()["events"]
        reasons = [e["message"] for e in events if e["stage"] in ("fallback", "refused", "capture")]
        # the report names a reason once; the accelerator itself knows what keeps plans away now
        refused = list(self.acc._refused.values())
        return " | ".join([*refused[-1:], *reasons[-2:]])

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.mode == "inference":
                stack.enter_context(torch.inference_mode())
            elif self.mode == "gradients":
                stack.enter_context(torch.enable_grad())
            else:
                stack.enter_context(torch.no_grad())
            if self.mode == "autocast":
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield


def compare_modules(ours: nn.Module, theirs: nn.Module, *, layouts: bool = True) -> None:
    """What belongs to two modules, piece by piece; strides with `layouts`.

    Raises:
        Wrong: something is not alike; the message names it.
    """
    mine, others = dict(ours.named_modules()), dict(theirs.named_modules())
    if list(mine) != list(others):
        raise Wrong(f"other submodules: {set(mine) ^ set(others)}")
    for path, module in mine.items():
        twin = others[path]
        if _attributes(module) != _attributes(twin):
            raise Wrong(f"{path or 'the model'} has other attributes: {_attributes(module) ^ _attributes(twin)}")
        for kind in ("_parameters", "_buffers"):
            if list(getattr(module, kind)) != list(getattr(twin, kind)):
                raise Wrong(f"{path}.{kind} differs")
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            # a hook's number is of the whole process
            if len(getattr(module, kind)) != len(getattr(twin, kind)):
                raise Wrong(f"{path}.{kind} differs")
        for name, value in _held(twin):
            _compare_tensors(f"{path}.{name}", dict(_held(module))[name], value, layouts=layouts)
    shared = [[n for n, p in m.named_parameters(remove_duplicate=False)] for m in (ours, theirs)]
    alone = [[n for n, p in m.named_parameters()] for m in (ours, theirs)]
    if shared[0] != shared[1] or alone[0] != alone[1]:
        raise Wrong("other parameters are tied")


def _compare_tensors(path: str, ours: torch.Tensor, theirs: torch.Tensor, *, layouts: bool) -> None:
    views = (torch.Tensor.stride,) if layouts else ()
    for what in (*views, type, torch.Tensor.storage_offset, _storage, lambda t: (t.dtype, t.requires_grad)):
        if what(ours) != what(theirs):
            raise Wrong(f"{path} is {what(ours)}, not {what(theirs)}")
    if not torch.equal(ours, theirs):
        raise Wrong(f"{path} has other values")


def _foreign_forward(module: nn.Module) -> bool:
    # accelerate leaves the class's own forward, of the time when it came, on the instance
    forward = module.__dict__.get("forward")
    own = getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own and not getattr(forward, "vouched", False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _attributes(module: nn.Module) -> set[str]:
    names = {n for n, v in module.__dict__.items() if not n.startswith("_forward")}
    forward = module.__dict__.get("forward")
    inner = getattr(forward, "__func__", None)
    # accelerate leaves the class's own forward on an instance; an accelerator that is gone may be left where
    # somebody's wrapper that held it put it back
    if inner is type(module).forward or (
        isinstance(forward, AcceleratedForward) and not forward.accelerator.installed()
    ):
        names.discard("forward")
    return names


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for container in (module._parameters, module._buffers, module.__dict__):
        for name, value in container.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def _places(module: nn.Module) -> list[tuple[str, int]]:
    found = []
    for path, each in module.named_modules():
        found.append((path, id(each)))
        found += [(f"{path}.{name}", id(value)) for name, value in _held(each)]
    return found


def _result(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    try:
        return module(*args, **kwargs)
    except Exception as exc:
        return exc


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _detached(result: Any) -> Any:
    return (
        result
        if isinstance(result, Exception)
        else torch.utils._pytree.tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, result)
    )


def _tuple(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)
