from __future__ import annotations

import functools
import types

import pytest
import torch
from omegaconf import ListConfig, OmegaConf
from torch import nn

from sfast_ext import accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.behaviour.structure import structure


class Processor:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.processor = Processor([0.5])
        self.s1 = None
        # as a host hands its configuration to a model
        self.levels = OmegaConf.create({"model": {"levels": [1, {"depth": 2}], "name": "a"}}).model.levels

    def forward(self, x):
        return self.processor(self.inner(x))


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block())


def key(model):
    return fingerprint(model).key


def test_the_key_stays_while_nothing_changes_but_values_of_weights(model):
    before = key(model)
    with torch.no_grad():
        model[0].inner.weight.fill_(1)
    model[1].inner.weight = nn.Parameter(torch.zeros(2, 2))
    model.requires_grad_(False)
    assert key(model) == before


def patch_forward(model):
    model[0].inner.forward = lambda x: x


def hook(model):
    model[1].inner.register_forward_hook(lambda *a: None)


def scalar(model):
    model[0].s1 = 0.9


def processor_scale(model):
    model[0].processor.scale[0] = 0.6


def other_processor(model):
    model[0].processor = Processor([0.5])


def submodule(model):
    model[0].inner = nn.Linear(2, 2)


def bias(model):
    model[0].inner._parameters["bias"] = None


def config_entry(model):
    model[1].levels[0] = 3


def nested_config_entry(model):
    model[1].levels[1].depth = 3


def training(model):
    model[1].eval()


def other_class(model):
    model[0].__class__ = type("Patched", (Block,), {})


@pytest.mark.parametrize(
    "change",
    [
        patch_forward,
        hook,
        scalar,
        processor_scale,
        config_entry,
        nested_config_entry,
        other_processor,
        submodule,
        bias,
        training,
        other_class,
    ],
)
def test_what_changes_the_key(model, change):
    before = fingerprint(model)
    assert before.unchanged()
    change(model)
    assert not before.unchanged() and key(model) != before.key


@pytest.mark.parametrize(("kind", "name"), [(Block, "forward"), (Processor, "__call__")])
def test_a_patched_class_changes_the_key(kind, name, model, monkeypatch):
    before = fingerprint(model)
    monkeypatch.setattr(kind, name, lambda self, x: x)
    assert not before.unchanged() and key(model) != before.key


def test_a_quick_check_is_not_fooled_by_an_address_used_again(model):
    model[0].s1 = float("1.5")
    before = fingerprint(model)
    for value in range(1000):
        model[0].s1 = value + 0.25
        assert not before.unchanged()


def test_a_quick_check_is_not_fooled_by_an_address_used_again_beside_a_tensor(model):
    model[0].table, model[0].s1 = torch.zeros(2), float("1.5")
    before = fingerprint(model)
    for value in range(1000):
        model[0].s1 = value + 0.25
        assert not before.unchanged()


def test_a_list_that_grows_at_every_call_is_no_reason_to_read_again(model):
    model[0].table = [1.0] * 65
    before = fingerprint(model)
    model[0].table.append(1.0)
    assert before.unchanged() and before.unchanged_quick() and key(model) == before.key


def test_a_quick_check_sees_a_hook_taken_away_and_another_put_in_its_place(model):
    handle = model[1].inner.register_forward_hook(lambda *a: None)
    before = fingerprint(model)
    handle.remove()
    model[1].inner.register_forward_hook(lambda *a: None)
    assert not before.unchanged()


def renamed(model):
    """The last attribute goes, another of the same value takes its place."""
    del model[0].s1
    model[0].s2 = None


def attribute_of_an_empty_processor(model):
    model[0].processor.later = 2.0


def list_grown_short(model):
    del model[0].table[1:]


@pytest.mark.parametrize("change", [renamed, attribute_of_an_empty_processor, list_grown_short])
def test_a_quick_check_sees_what_a_reading_would(model, change):
    model[0].s1 = None
    model[0].table = [1.0] * 65
    vars(model[0].processor).clear()
    model[0].s1 = vars(model[0]).pop("s1")
    before = fingerprint(model)
    assert before.unchanged()
    change(model)
    assert not before.unchanged()


def test_of_a_configuration_only_what_is_in_it_is_read(model, monkeypatch):
    before = fingerprint(model)
    assert not any(kind.__module__.startswith("omegaconf") for kind in before.classes)
    model[0].levels._get_root().model.name = "b"
    assert before.unchanged() and key(model) == before.key
    # one of an extension has methods of its own

    class Doubled(ListConfig):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)

    model[0].levels = Doubled([1])
    before = fingerprint(model)
    assert Doubled in before.classes
    monkeypatch.setattr(Doubled, "__getitem__", ListConfig.__getitem__)
    assert not before.unchanged()


def test_a_parameter_in_the_place_of_another_needs_no_reading(model):
    before = fingerprint(model)
    model[0].inner.weight = nn.Parameter(torch.zeros(2, 2))
    assert before.unchanged() and key(model) == before.key
    model[0].inner._parameters["bias"] = None
    assert not before.unchanged()


def test_a_tensor_among_attributes_is_told_by_its_identity(model):
    model[0].table = torch.zeros(2)
    before = fingerprint(model)
    assert before.unchanged()
    model[0].table = torch.zeros(2)
    assert not before.unchanged()


def test_bookkeeping_attributes_can_be_left_out(model):
    before = fingerprint(model, frozenset({"network_current_names"})).key
    model[0].inner.network_current_names = (("lora", 1.0),)
    assert fingerprint(model, frozenset({"network_current_names"})).key == before
    assert key(model) != before


def test_patches_are_found_and_named(model):
    assert fingerprint(model).patches == []

    def foreign(self, x):
        return x

    model[0].inner.forward = types.MethodType(functools.partial(foreign), model[0].inner)
    model[1].register_forward_pre_hook(foreign)
    found = {p.path: p for p in fingerprint(model).patches}
    assert set(found) == {"0.inner", "1"}
    assert found["1"].kind == "hook" and str(found["1"].reason()).startswith("1 has a foreign hook, ")
    assert "test_fingerprint" in str(found["1"].reason())


def test_wrappers_of_the_root_are_no_patches(model):
    before = key(model)
    model.forward = lambda x: x
    model.register_forward_hook(lambda *a: None)
    found = fingerprint(model)
    assert found.patches == [] and found.key == before


def test_the_classs_own_forward_left_on_an_instance_is_no_patch(model):
    before = key(model)
    model[0].inner.forward = model[0].inner.forward
    found = fingerprint(model)
    assert found.patches == [] and found.key == before


def test_which_function_a_transparent_forward_is_says_nothing(model):
    def moves_arguments():
        return lambda *args: args

    known = {model[0].inner: moves_arguments()}
    transparent = lambda module, kind, function: kind == "forward" and known.get(module) is function
    read = lambda: fingerprint(model, transparent=transparent)
    before = read()
    model[0].inner.forward = known[model[0].inner]
    assert read().key == before.key and not before.unchanged()
    # the host lays another over it each time that it brings the module
    model[0].inner.forward = known[model[0].inner] = moves_arguments()
    assert read().key == before.key and [p.path for p in read().patches] == ["0.inner"]
    model[0].inner.forward = moves_arguments()
    assert read().key != before.key


def function_of_extension(source, extension="regional", folder="extensions"):
    scope = {"__name__": "scripts.regional"}
    exec(compile(source, f"/webui/{folder}/{extension}/scripts/regional.py", "exec"), scope)
    return scope["patched"]


PATCHED = "def patched(self, x):\n    return x\n"


def test_a_method_laid_over_an_instance_is_a_patch_and_says_whose(model):
    class WithMethod(Block):
        def _forward(self, x):
            return x

    model.append(WithMethod())
    model[2]._forward = model[2]._forward
    assert fingerprint(model).patches == []
    model[2]._forward = types.MethodType(function_of_extension(PATCHED), model[2])
    (found,) = fingerprint(model).patches
    assert found.kind == "method"
    assert str(found.reason()) == "2 has a foreign method, scripts.regional.patched of the extension regional"


def test_an_attribute_that_is_no_method_of_the_class_is_no_patch(model):
    model[0].activation = torch.nn.functional.gelu
    model[0].to = lambda *a, **k: model
    assert fingerprint(model).patches == []


@pytest.mark.parametrize("folder", ["extensions", "extensions-builtin"])
def test_a_class_that_an_extension_exchanged_is_a_patch_but_for_the_hosts_own(folder, model, monkeypatch):
    monkeypatch.setattr(Block, "forward", function_of_extension(PATCHED, folder=folder))
    found = fingerprint(model).patches
    assert [p.kind for p in found] == (["class", "class"] if folder == "extensions" else [])
    if found:
        assert "0 has a foreign forward of its class, scripts.regional.patched of the extension regional" in (
            str(found[0].reason())
        )


def test_a_class_that_an_extension_brings_is_a_patch_but_in_its_own_network(model):
    scope = {"nn": nn, "__name__": "scripts.adapter"}
    source = "class Adapter(nn.Module):\n    def forward(self, x):\n        return x\n"
    exec(compile(source, "/webui/extensions/adapter/scripts/adapter.py", "exec"), scope)
    model.append(scope["Adapter"]())
    (found,) = fingerprint(model).patches
    assert str(found.reason()).startswith("2 has a foreign forward of its class, scripts.adapter.Adapter.forward of ")
    own = scope["Adapter"]()
    own.inner = scope["Adapter"]()
    assert fingerprint(own).patches == []


def test_a_processor_that_an_extension_brings_is_a_patch(model):
    scope = {"__name__": "scripts.louder"}
    source = "class Louder:\n    def __call__(self, x):\n        return 2 * x\n"
    exec(compile(source, "/webui/extensions/loud/scripts/louder.py", "exec"), scope)
    model[0].processor = scope["Louder"]()
    (found,) = fingerprint(model).patches
    assert (found.path, found.kind) == ("0", "processor") and "of the extension loud" in str(found.reason())


def test_our_own_forward_on_a_part_changes_nothing(model):
    before = key(model)
    acc = accelerate(model[0])
    found = fingerprint(model)
    assert found.key == before and found.patches == []
    acc.release()
    model[1].forward = function_of_extension(PATCHED)
    patched = fingerprint(model)
    acc = accelerate(model[1])
    assert fingerprint(model).key == patched.key and len(fingerprint(model).patches) == len(patched.patches) == 1
    acc.release()


def test_modules_of_one_kind_have_one_structure(model):
    other = nn.Sequential(Block(), Block())
    assert key(other) != key(model) and structure(other) == structure(model)
    tied = nn.Sequential(*[Block()] * 2)
    assert structure(tied) != structure(model)


@pytest.mark.parametrize(
    "change",
    [patch_forward, hook, scalar, processor_scale, config_entry, nested_config_entry, bias, training, other_class],
)
def test_what_changes_the_structure(model, change):
    before = structure(model)
    change(model)
    assert structure(model) != before


def scripted(source, **scope):
    """Names of a module of the host's, as its source defines them."""
    scope["__name__"] = "modules.unet"
    exec(compile(source, "/webui/modules/unet.py", "exec"), scope)
    return scope


HOST = """
LOUDNESS = 1.0

def scaled(x):
    return x * LOUDNESS

class Layer(nn.Module):
    def forward(self, x):
        return self._forward(x)

    def _forward(self, x):
        return scaled(th.cat([x, x]))
"""


@pytest.fixture
def hosted():
    stand_in = types.SimpleNamespace(cat=torch.cat)
    scope = scripted(HOST, nn=nn, th=stand_in)
    return nn.Sequential(scope["Layer"](), scope["Layer"]()), scope, stand_in


PATCHES = {
    "method": lambda scope, th, function: setattr(scope["Layer"], "_forward", function),
    "function": lambda scope, th, function: scope.update(scaled=function),
    "stand-in": lambda scope, th, function: setattr(th, "cat", function),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_the_methods_of_a_class_call_is_read(name, hosted):
    model, scope, stand_in = hosted
    before = fingerprint(model)
    assert before.patches == [] and before.unchanged_quick()
    PATCHES[name](scope, stand_in, function_of_extension(PATCHED))
    assert not before.unchanged() and not before.unchanged_quick()
    after = fingerprint(model)
    assert after.key != before.key
    assert {p.kind for p in after.patches} == {"function"}
    assert "has a foreign function in its class, scripts.regional.patched of the ext" in str(after.patches[0].reason())


LATER = {
    "method over an inherited one": lambda scope, th, function: setattr(scope["Finer"], "_forward", function),
    "function over a builtin": lambda scope, th, function: scope.update(max=function),
    "function over a class": lambda scope, th, function: scope.update(Kind=function),
    "callable over a value": lambda scope, th, function: setattr(scope["Finer"], "hook", function),
}
FINER = """
class Kind:
    pass

class Finer(Layer):
    hook = None

    def forward(self, x):
        return self._forward(max(x, x)) if Kind else x
"""


@pytest.mark.parametrize("name", LATER)
def test_what_methods_find_later_is_read_once_a_generation(name, hosted):
    _, scope, stand_in = hosted
    exec(compile(FINER, "/webui/modules/unet.py", "exec"), scope)
    model = nn.Sequential(scope["Finer"]())
    keys = BehaviourKeys(model, frozenset(), None, 8)
    keys.begin_generation()
    number, foreign = keys.read()
    assert foreign is None and keys.trusted
    keys.begin_generation()
    assert keys.read()[0] == number
    LATER[name](scope, stand_in, function_of_extension(PATCHED))
    keys.begin_generation()
    assert keys.read()[0] != number and keys.last[1] is not None


def test_a_generation_in_which_nothing_changed_is_not_read_anew(model, monkeypatch):
    asked = []
    keys = BehaviourKeys(model, frozenset(), lambda *patch: asked.append(patch) or len(asked) < 3, 8)
    patch_forward(model)
    keys.begin_generation()
    first = keys.read()
    monkeypatch.setattr("sfast_ext.behaviour.fingerprint.fingerprint", None)
    keys.begin_generation()
    assert keys.stale and keys.read() == first and not keys.stale
    # the host is asked all the same
    keys.begin_generation()
    assert keys.read()[1] is not None


def test_a_plain_value_that_a_method_reads_is_in_the_key(hosted):
    model, scope, _ = hosted
    before = fingerprint(model)

    def louder(self, x):
        return x * LOUDNESS  # noqa: F821

    scope["Layer"]._forward = types.FunctionType(louder.__code__, scope)
    middle = fingerprint(model)
    scope["LOUDNESS"] = 2.0
    assert not middle.unchanged_quick() and len({before.key, middle.key, key(model)}) == 3


def test_a_plain_value_that_a_hook_reads_is_in_the_key(model):
    scope = scripted("LEVEL = 1.0\ndef louder(module, args):\n    return args[0] * LEVEL\n")
    model[0].inner.register_forward_pre_hook(scope["louder"])
    before = fingerprint(model)
    scope["LEVEL"] = 2.0
    assert not before.unchanged_quick() and key(model) != before.key


@pytest.mark.parametrize("change", [patch_forward, hook, other_class])
def test_within_a_generation_a_late_patch_is_seen(model, change):
    keys = BehaviourKeys(model, frozenset(), None, 8)
    keys.begin_generation()
    number, foreign = keys.read()
    assert keys.trusted and foreign is None
    change(model)
    assert not keys.trusted and keys.read()[0] != number


def test_the_forward_of_the_model_itself_exchanged_by_an_extension_is_a_patch(monkeypatch):
    model = nn.Sequential(Block())
    root = Block()
    root.inner = model
    monkeypatch.setattr(Block, "forward", function_of_extension(PATCHED))
    assert ("", "class") in {(p.path, p.kind) for p in fingerprint(root).patches}


def test_a_forward_of_ours_that_somebody_stored_changes_nothing(model):
    before = key(model)
    acc = accelerate(model[0])
    model[1].original_forward_of_theirs = model[0].forward
    found = fingerprint(model)
    assert found.key == before and found.patches == []
    acc.release()
