"""What hosts do to weights. None of it is announced: the very next call is to see it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import random
from dataclasses import replace

import torch
from torch import nn

from fuzz.compare import Wrong
from fuzz.nets import arguments, move
from fuzz.world import PRODUCTS, Event, World, result
from sfast_ext.weights.weight import WeightsAway, WeightsChanged, places_of, tensors_of


def _values(seed: int, like: torch.Tensor, name: str) -> torch.Tensor:
    # in the size of a fresh initialisation, so that activations stay near one however many follow
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(like.shape, generator=generator)
    if like.dim() > 1:
        noise *= like[0].numel() ** -0.5
    else:
        noise = 0.1 * noise + (1 if name.endswith("weight") else 0)
    return noise.to(like)


def _nearer(old: torch.Tensor, seed: int, name: str, share: float = 0.3) -> torch.Tensor:
    # computed in one order: of the weight's own and of its twin's in another, a CPU may round an element otherwise
    values = old.detach().contiguous().lerp(_values(seed, old, name).contiguous(), share)
    return torch.empty_like(old).copy_(values)


def _some(w: World, rng: random.Random) -> list[str]:
    names = [n for n, _ in w.twin.named_parameters()]
    return rng.sample(names, min(len(names), rng.choice((1, 1, 3, 8))))


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    home, _, name = path.rpartition(".")
    return module.get_submodule(home), name


def lora_in_place(w: World, rng: random.Random) -> None:
    def change(m: nn.Module, path: str, seed: int) -> None:
        p = m.get_parameter(path)
        p.copy_(_nearer(p, seed, path))

    for path in _some(w, rng):
        w.both(functools.partial(change, path=path, seed=rng.getrandbits(32)))


def lora_replaced(w: World, rng: random.Random) -> None:
    def change(m: nn.Module, path: str, seed: int) -> None:
        owner, name = _owner(m, path)
        old = getattr(owner, name)
        # a parameter that is tied stays tied only if the host sees to it; here it does not
        setattr(owner, name, nn.Parameter(_nearer(old, seed, path), requires_grad=old.requires_grad))

    for path in _some(w, rng):
        w.both(functools.partial(change, path=path, seed=rng.getrandbits(32)))


def merged_under_inference_mode(w: World, rng: random.Random) -> None:
    """Weights that are inference tensors, for some calls; other events write to weights, which these do not bear."""
    if w.gradients():
        # autograd saves no inference tensor: the original would raise
        return
    paths, seed = _some(w, rng), rng.getrandbits(32)
    trained = [w.twin.get_parameter(path).requires_grad for path in paths]

    def merge(m: nn.Module) -> None:
        with torch.inference_mode():
            for path in paths:
                owner, name = _owner(m, path)
                old = getattr(owner, name)
                setattr(owner, name, nn.Parameter(_nearer(old, seed, path), requires_grad=False))

    def replace_merged(m: nn.Module) -> None:
        for path, requires_grad in zip(paths, trained):
            owner, name = _owner(m, path)
            setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone(), requires_grad=requires_grad))

    w.both(merge)
    was = w.request
    for _ in range(2):
        w.check()
        w.request = replace(was, width=rng.choice((8, 16)))
    w.request = was
    if rng.random() < 0.3:
        w.release()
        w.acc.install()
    w.both(replace_merged)


def lora_by_data(w: World, rng: random.Random) -> None:
    def change(m: nn.Module, path: str, seed: int) -> None:
        p = m.get_parameter(path)
        p.data = _nearer(p, seed, path)

    for path in _some(w, rng):
        w.both(functools.partial(change, path=path, seed=rng.getrandbits(32)))


def transposed_in_place(w: World, rng: random.Random) -> None:
    def change(m: nn.Module) -> None:
        p = m.get_parameter(path)
        p.data = p.data.t().clone() if own else p.data.t()

    w.laid_out.add(2)
    square = [n for n, p in w.twin.named_parameters() if p.dim() == 2 and p.shape[0] == p.shape[1]]
    path, own = rng.choice(square), rng.random() < 0.5
    w.both(change)


def channels_last(w: World, rng: random.Random) -> None:
    w.laid_out.add(4)
    # how torch computes a product depends on the layout of what comes in
    w.states.pop(PRODUCTS, None)
    wanted = rng.choice((torch.channels_last, torch.contiguous_format))
    w.both(lambda m: m.to(memory_format=wanted))


def moved(w: World, rng: random.Random) -> None:
    """There and back, as an offload does; if there is nowhere else to go, by copies. At times it is used there."""

    def change(m: nn.Module) -> None:
        for p in m.parameters():
            p.data = p.data.clone()

    if not w.ground.gpu:
        w.both(change)
        return
    w.both(lambda m: move(m, torch.device("cpu")))
    if rng.random() < 0.5:
        args, kwargs = arguments(w.request, rng, torch.float32, kind=w.kind)
        w.both(lambda m: m.float())
        with torch.no_grad():
            ours, theirs = result(w.subject, args, kwargs), result(w.twin, args, kwargs)
        w.compare(ours, theirs)
        w.both(lambda m: nn.Module.to(m, w.dtype))
    w.both(lambda m: move(m, w.ground.device))


def _state(w: World, seed: int) -> dict[str, torch.Tensor]:
    return {k: _values(seed + i, v, k) for i, (k, v) in enumerate(w.twin.state_dict().items())}


def checkpoint_in_place(w: World, rng: random.Random) -> None:
    state = _state(w, rng.getrandbits(32))
    w.both(lambda m: m.load_state_dict(state))


def checkpoint_assigned(w: World, rng: random.Random) -> None:
    state = _state(w, rng.getrandbits(32))
    w.both(lambda m: m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True))
    # assigning takes the flag from the state dict
    flag = next(w.twin.parameters()).requires_grad
    w.both(lambda m: m.requires_grad_(flag))


def tied(w: World, rng: random.Random) -> None:
    def change(m: nn.Module) -> None:
        m.get_submodule(second).weight = m.get_submodule(first).weight  # type: ignore[assignment]

    first, second = rng.sample(_alike(w, rng), 2)
    w.both(change)


def exchanged(w: World, rng: random.Random) -> None:
    def change(m: nn.Module) -> None:
        a, b = m.get_submodule(first), m.get_submodule(second)
        a.weight, b.weight = b.weight, a.weight

    first, second = rng.sample(_alike(w, rng), 2)
    w.both(change)


def exchanged_data(w: World, rng: random.Random) -> None:
    """Two change places by their data; the objects stay where they are."""

    def change(m: nn.Module) -> None:
        a, b = m.get_submodule(first).weight, m.get_submodule(second).weight
        a.data, b.data = b.data, a.data  # type: ignore[assignment]

    first, second = rng.sample(_alike(w, rng), 2)
    w.both(change)


def put_back(w: World, rng: random.Random) -> None:
    """Somebody replaces a weight for a while and keeps what was there: the object, its data or a state dict."""
    kept: dict[nn.Module, object] = {}

    def replace(m: nn.Module) -> None:
        owner, name = _owner(m, path)
        old = getattr(owner, name)
        kept[m] = {"parameter": lambda: old, "data": lambda: old.data, "state dict": owner.state_dict}[how]()
        new = _nearer(old, seed, path, 0.5)
        if by_data:
            old.data = new
        else:
            setattr(owner, name, nn.Parameter(new, requires_grad=old.requires_grad))

    def back(m: nn.Module) -> None:
        owner, name = _owner(m, path)
        old = kept.pop(m)
        if how == "parameter":
            setattr(owner, name, old)
        elif how == "data":
            getattr(owner, name).data = old
        else:
            owner.load_state_dict(old)  # type: ignore[arg-type]

    (path, *_), how, seed = _some(w, rng), rng.choice(("parameter", "data", "state dict")), rng.getrandbits(32)
    by_data = how != "parameter" and rng.random() < 0.5
    _, tied_paths, _ = tensors_of(w.twin)[id(w.twin.get_parameter(path))]
    if how == "data" and len(tied_paths) > 1:
        # its data in another object would leave two weights in one memory, which is not followed: docs/features.md
        by_data = True
    w.both(replace)
    w.check()
    w.both(back)


def untied(w: World, rng: random.Random) -> None:
    def change(m: nn.Module) -> None:
        for path, module in m.named_modules():
            for name, p in module._parameters.items():
                if p is not None and f"{path}.{name}" not in first:
                    setattr(module, name, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))

    first = {n for n, _ in w.twin.named_parameters()}
    w.both(change)


def _alike(w: World, rng: random.Random) -> list[str]:
    shapes: dict[torch.Size, list[str]] = {}
    for name, module in w.twin.named_modules():
        if type(module) is nn.Linear:
            shapes.setdefault(module.weight.shape, []).append(name)
    return rng.choice([names for names in shapes.values() if len(names) > 1])


def another_dtype(w: World, rng: random.Random) -> None:
    fits = [d for d in w.ground.limits if d != w.dtype and not (w.mode == "autocast" and d == w.ground.not_cast)]
    w.dtype = rng.choice(fits)
    w.both(lambda m: nn.Module.to(m, w.dtype))


def dtype_and_back(w: World, rng: random.Random) -> None:
    other = rng.choice([d for d in w.ground.limits if d != w.dtype])
    w.both(lambda m: nn.Module.to(nn.Module.to(m, other), w.dtype))


def offloaded(w: World, rng: random.Random) -> None:
    """As accelerate and SD.Next do it: the slots hold tensors on the meta device or the CPU, a call fails as it does
    without us, and what comes back is another object, or the same one."""

    def away(m: nn.Module) -> None:
        for module in m.get_submodule(where).modules():
            for name, p in module._parameters.items():
                if p is not None:
                    held.append((module, name, p))
                    elsewhere = p.to("cpu") if to == "cpu" else torch.empty_like(p, device="meta")
                    module._parameters[name] = nn.Parameter(elsewhere, p.requires_grad)

    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    where = rng.choice(("", w.pick(rng, (nn.Linear, nn.Conv2d))))
    to = rng.choice(("meta", "cpu")) if w.ground.gpu else "meta"
    w.both(away)
    # a GPU's kernel would read from where the meta tensor is not; what a processor keeps of such a call is nobody's
    # memory as well, and mixed into later results
    if rng.random() < 0.5 and (to == "cpu" or not w.ground.gpu) and not w.watched:
        ours, theirs = w.call_both()
        # torch computes on with some kinds of layers, on memory that is nobody's
        if isinstance(theirs, Exception) and type(ours) is not type(theirs):
            raise Wrong(f"with weights away the original gives {theirs!r}, accelerated {ours!r}")
    same = rng.random() < 0.5
    for module, name, p in held:
        module._parameters[name] = p if same else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)


def memory_given_back(w: World, rng: random.Random) -> None:
    """The host has moved all weights or some, on a GPU at times to system memory, and takes the memory that plans read;
    at times plans fetch them before they are back."""
    away = w.ground.gpu and rng.random() < 0.5
    share, seed = rng.choice((1.0, 1.0, 0.5, 0.1)), rng.random()

    def change(m: nn.Module) -> None:
        moves = random.Random(seed)
        for container, name in places_of(m).values():
            if moves.random() >= share:
                continue
            data = container[name].data
            container[name].data = data.to("cpu") if away else data.clone()

    def bring(m: nn.Module) -> None:
        for container, name in places_of(m).values():
            container[name].data = container[name].data.to(w.ground.device)

    w.both(change)
    given = w.acc.give_memory_back()
    if given and w.acc.plans and not w.acc.arena.vacant:
        raise Wrong("memory was given back, and plans have it still")
    if rng.random() < 0.3 and not away:
        lora_in_place(w, rng)
    if rng.random() < 0.5:
        # hosts go on whatever it raises
        with contextlib.suppress(Exception if w.faults else (WeightsAway, WeightsChanged)):
            w.acc.fetch_weights()
    if away:
        w.both(bring)


def buffer_changed(w: World, rng: random.Random) -> None:
    def change(m: nn.Module) -> None:
        if how == "in place":
            m.offset.mul_(value)
        elif how == "replaced":
            m.offset = torch.full_like(m.offset, value)
        else:
            m.table = torch.full_like(m.table, value)

    if w.kind == "unet":
        return
    how, value = rng.choice(("in place", "replaced", "plain attribute")), rng.uniform(0.5, 1.5)
    w.both(change)


def copied(w: World, rng: random.Random) -> None:
    """A copy runs its own weights, and changing it changes nothing here."""
    try:
        theirs = copy.deepcopy(w.twin)
    except Exception:
        return  # what tests lay over modules cannot be copied
    with torch.no_grad():
        ours = copy.deepcopy(w.subject)
        path = rng.choice([n for n, _ in ours.named_parameters()])
        for module in (ours, theirs):
            module.get_parameter(path).mul_(0.5)
    subject, twin = w.subject, w.twin
    w.subject, w.twin = ours, theirs
    try:
        a, b = w.call_both()
        w.compare(a, b)
    finally:
        w.subject, w.twin = subject, twin


def pickled(w: World, rng: random.Random) -> None:
    """A module that is saved whole and loaded runs its own weights, without us."""
    try:
        theirs = pickle.dumps(w.twin)
    except Exception:
        return  # what tests lay over modules cannot be saved
    ours = pickle.dumps(w.subject)
    subject, twin = w.subject, w.twin
    w.subject, w.twin = (pickle.loads(data) for data in (ours, theirs))
    try:
        a, b = w.call_both()
        w.compare(a, b)
    finally:
        w.subject, w.twin = subject, twin


def saved(w: World, rng: random.Random) -> None:
    """A state dict is what it was, to the last stride: safetensors asks for them."""
    file = io.BytesIO()
    ours, theirs = w.subject.state_dict(), w.twin.state_dict()
    torch.save(ours, file)
    file.seek(0)
    read = torch.load(file)
    if list(read) != list(theirs) or not all(torch.equal(read[k], v) for k, v in theirs.items()):
        raise Wrong("the saved state dict differs")
    for name, value in theirs.items():
        if value.dim() not in w.laid_out and ours[name].stride() != value.stride():
            raise Wrong(f"{name} would be saved with strides {ours[name].stride()}, not {value.stride()}")


EVENTS: dict[Event, int] = {
    lora_in_place: 10, lora_replaced: 8, lora_by_data: 8,
    merged_under_inference_mode: 3, transposed_in_place: 4, channels_last: 4, moved: 5,
    checkpoint_in_place: 8, checkpoint_assigned: 8, tied: 2, untied: 4, exchanged: 2, exchanged_data: 2, put_back: 5,
    another_dtype: 2, dtype_and_back: 4, offloaded: 6, memory_given_back: 6, buffer_changed: 6, copied: 3,
    saved: 4, pickled: 3,
}  # fmt: skip
