"""Patches that stay laid while they are off, as FreeU's does: read from their code; the real one: tests/hosts/live."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.test_a1111 import count, host, same, started, status, untouched  # noqa: F401
from sfast_ext.hosts.a1111.dormant_patches import DormantPatches, read_patch

FOLDER = "/webui/extensions/loud/lib_loud/patches.py"

# as in sd-webui-freeu, whose switch is an attribute of an object that each image makes anew
KEYWORD = """
def patch(things, *args, before, **kwargs):
    if not state.current.on:
        return before(things, *args, **kwargs)

    first, *others = things
    return before([first * state.factor, *others], *args, **kwargs)
"""
CLOSURE = """
def lay(before, factor=2):
    def patch(x, context=None, *, scale=1):
        if not state.current.on:
            return before(x, context, scale=scale)
        return before(x * factor, context, scale=scale * factor)

    return patch
"""


def written(source: str, **names):
    """A function of an extension's file."""
    scope = {"state": SimpleNamespace(current=SimpleNamespace(on=False), factor=1.5), "torch": torch, **names}
    exec(compile(source, FOLDER, "exec"), scope)
    return scope


def laid(source: str, before=max, **names):
    scope = written(source, **names)
    patch = scope["lay"](before) if "lay" in scope else functools.partial(scope["patch"], before=before)
    return patch, scope["state"]


@pytest.mark.parametrize("source", [KEYWORD, CLOSURE])
def test_a_patch_behind_a_switch_is_read(source):
    patch, state = laid(source)
    found = read_patch(patch)
    assert found is not None and found.active() is None
    state.current = SimpleNamespace(on=True)
    assert "patch of the extension loud is on" in str(found.active())
    del state.current
    assert found.active() is not None


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("not state.current.on", "state.current.on"),
        ("not state.current.on", "not state.current.on and state.other"),
        ("not state.current.on", "not things"),
        ("not state.current.on", "not state.current.on()"),
        ("if not", "calls.append(1)\n    if not"),
        ("return before(things", "return before(things[:1]"),
        ("return before(things, *args, **kwargs)\n\n", "return before(things, *args)\n\n"),
        ("return before(things, *args, **kwargs)\n\n", "before(things, *args, **kwargs)\n\n"),
        ("return before(things, *args, **kwargs)\n\n", "return torch.cat(things, *args, **kwargs)\n\n"),
    ],
)
def test_any_other_beginning_is_not_vouched_for(what, instead):
    assert what in KEYWORD
    patch, _ = laid(KEYWORD.replace(what, instead, 1), calls=[])
    assert read_patch(patch) is None


def test_the_switch_may_not_be_the_functions_own_to_change():
    source = CLOSURE.replace("if not", "context = scale\n        if not")
    assert read_patch(laid(source)[0]) is None
    source = CLOSURE.replace("return before(x * factor", "run = lambda: x\n        return before(run() * factor")
    assert read_patch(laid(source)[0]) is None


def test_what_it_passes_on_to_counts_too():
    lower, low = laid(KEYWORD)
    upper, _ = laid(CLOSURE, before=lower)
    assert read_patch(upper).active() is None
    low.current.on = True
    assert read_patch(upper).active() is not None
    strange = written("def strange(x):\n    return -x\n")["strange"]
    assert read_patch(laid(KEYWORD, before=strange)[0]) is None


def test_switches_of_patches_that_are_no_longer_laid_are_forgotten():
    dormant = DormantPatches()
    patches = [laid(KEYWORD) for _ in range(3)]
    for patch, _ in patches:
        dormant.new_pass()
        dormant.new_pass()
        assert dormant.vouch(patch)
    for (_, state), known in zip(patches, (False, True, True)):
        state.current.on = True
        assert (dormant.active() is not None) == known
        state.current.on = False


@pytest.mark.parametrize("what", [torch.cat, functools.partial(torch.cat, dim=1), torch.nn.Linear(1, 1), len, None])
def test_other_things_are_no_such_patches(what):
    assert read_patch(what) is None


@pytest.fixture
def over_cat(monkeypatch):
    """Such a patch over `cat` of the module of ldm's UNet, as the WebUI's stand-in for torch has it; its switch."""
    patch, state = laid(KEYWORD, before=torch.cat)
    stand_in = SimpleNamespace(**vars(torch))
    stand_in.cat = patch
    monkeypatch.setattr(sys.modules["ldm.modules.diffusionmodules.openaimodel"], "th", stand_in)
    return state


def switch(state, on):
    state.current = SimpleNamespace(on=on)


def image(state, on, **options):
    """The image without us, from the start with the switch if it is told."""
    switch(state, on)
    return untouched(1, **options)


def test_it_is_accelerated_while_it_is_off_and_named_while_it_is_on(host, over_cat):  # noqa: F811
    plain, changed = image(over_cat, False), image(over_cat, True)
    assert not same(changed, plain, 0.01)
    started(host)
    for on in (False, True, False, True):
        switch(over_cat, on)
        before, captures = count("plans run"), count("captures")
        assert same(host.generate(), changed if on else plain)
        assert count("captures") == (1 if captures == 0 else captures)
        assert (count("plans run") == before) == on
    assert [reason for reason in status()["reasons"] if "patch of the extension loud" in reason]


def test_it_is_off_at_last_that_was_on_at_first(host, over_cat):  # noqa: F811
    changed, plain = image(over_cat, True), image(over_cat, False)
    started(host)
    switch(over_cat, True)
    assert same(host.generate(), changed) and count("plans run") == 0
    switch(over_cat, False)
    assert same(host.generate(), plain) and count("plans run") == 2


def test_a_switch_that_turns_in_mid_run_is_seen_at_once(host, over_cat):  # noqa: F811
    def turn():
        switch(over_cat, not over_cat.current.on)

    for on in (False, True):
        expected = image(over_cat, on, refiner=turn)
        switch(over_cat, False)
        if not on:
            started(host)
        host.generate()
        switch(over_cat, on)
        assert same(host.generate(refiner=turn), expected)
