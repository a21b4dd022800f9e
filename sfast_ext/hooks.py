"""What a host adds to an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Hooks:
    """What a host adds to an accelerator. Each is optional."""

    bypass_reason: Callable[[], str | None] | None = None
    """At each call: why it is bypassed, which is that the original forward must run; or None. Microseconds."""
    prepare: Callable[[], None] | None = None
    """At each call, before the weights are looked at: bring lazy weights up to date."""
    key: Callable[[], Hashable] | None = None
    """At each call: behaviour that shows in no argument and in no attribute of a module."""
    recognised: Callable[[nn.Module, str, Any], bool] | None = None
    """Vouches for a patch on a module: (module, kind as in `behaviour.Patch`, function). Others mean the original
    forward."""
    transparent: Callable[[nn.Module, str, Any], bool] | None = None
    """Whether a forward laid over a module computes what the module's own does. Plans outlast its exchange for another
    such: a host may lay one over a module each time that it moves it. Arguments as of `recognised`, which is asked as
    well."""
    ignored: frozenset[str] = frozenset()
    """Module attributes that are bookkeeping of the host's, and change without changing what a forward computes."""
