"""What a host adds to an accelerator; see hosts/README.md."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sfast_ext.reasons import Reason

Read = tuple[tuple[Any, ...], dict[str, Any]] | Reason | str
"""The arguments that a forward reads, or why it must be bypassed."""


@dataclass
class Hooks:
    """What a host adds to an accelerator. Each is optional."""

    bypass_reason: Callable[[], Reason | str | None] | None = None
    """Asked at each call: why the original forward must run (the call is bypassed); None if it need not. Takes
    microseconds."""
    prepare: Callable[[], None] | None = None
    """Called at each call, before the weights and `key` are read: updates weights that the host changes lazily."""
    key: Callable[[], Hashable] | None = None
    """Asked at each call: what changes the forward and appears in no argument and in no attribute of a module."""
    recognised: Callable[[nn.Module, str, Any], bool] | None = None
    """Whether a patch on a module is known to be captured correctly: (module, kind as in `behaviour.Patch`, function).
    Any other patch bypasses the call."""
    transparent: Callable[[nn.Module, str, Any], bool] | None = None
    """Whether a forward put over a module's computes what the module's own does. Plans stay valid when one such forward
    replaces another: a host may put one over a module each time it moves it. The arguments are those of `recognised`,
    which is asked as well."""
    words: Callable[[Sequence[tuple[int, ...]]], str | None] | None = None
    """How a user names a call whose tensors have these shapes, such as "512x512, 1 image"; None if they do not."""
    interrupted: Callable[[], bool] | None = None
    """Whether the user has interrupted the host's work. Asked between the stages of a preparation, which it ends."""
    ignored: frozenset[str] = frozenset()
    """Module attributes that the host uses for bookkeeping. They change without changing what a forward computes. So do
    dicts, lists and sets that are the defaults of parameters of these names."""
    ignored_globals: frozenset[tuple[str, str]] = frozenset()
    """Globals in which functions of the host note what they did, as (name of the module, name): a replay may leave the
    note out. They are no part of the behaviour of code that sets them without looking them up."""
    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Read] | None = None
    """Asked at each call: its arguments without those that the forward does not read, on which plans must not depend;
    or why the call must be bypassed. The original forward gets all of them."""
    consumed: frozenset[str] = frozenset()
    """Keyword arguments whose lists and dicts the forward empties. Each run of the original gets copies of these."""
    system_memory: Callable[[int], bool] | None = None
    """Whether system memory has room for weights of so many bytes that the host has on the GPU, see
    `Config.resident`."""
    short_of_memory: Callable[[], bool] | None = None
    """Asked if the original forward ran out of GPU memory, and plans hold none: whether the host gave some way, so that
    it may run again."""
    scratch: frozenset[str] = frozenset()
    """Names of keyword arguments in which the forward notes where it is, for functions that it calls, and which nobody
    reads after the call. What it changes in them is not repeated."""
