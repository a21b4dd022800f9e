"""What happens to models whose half-precision weights are in system memory, in random order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pretended_card import GPU
from torch import nn

from .test_resident import CARD, OFF


class RandomLife:
    """A model, its twin, and what happens to them; for a class that has `ours` and `acc` as `On` has them.

    Attributes:
        events: what may happen, by name.
        most: of the error in 8 bits.
    """

    ours: nn.Module
    acc: Any
    events: dict[str, Callable[[Any], None]]
    most: float

    def begin(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.done: list[str] = []
        self.hook: Any = None

    def error_now(self) -> float:
        """Of a call of the size that is in use."""
        raise NotImplementedError

    def change(self) -> None:
        """Of weights, of both models."""
        raise NotImplementedError

    def hooked(self) -> nn.Module:
        """A layer that gets a hook."""
        raise NotImplementedError

    def is_whole(self) -> bool:
        """Whether all weights are on the GPU."""
        raise NotImplementedError

    def step(self) -> None:
        name = self.rng.choice(list(self.events))
        self.done.append(name)
        self.events[name](self)
        for _ in range(self.rng.randint(1, 3)):
            error = self.error_now()
            exact = self.acc.config.eight_bits is False or self.hook is not None
            assert error < (0.02 if exact else self.most), (error, self.done, self.acc.report.as_dict()["events"])

    def leave(self) -> None:
        self.ours.to("cpu")
        if self.rng.random() < 0.5:
            self.acc.give_memory_back()
        if self.rng.random() < 0.5:
            self.change()
        if self.rng.random() < 0.6:
            with self.acc.keeping_aside(GPU):
                if self.rng.random() < 0.5:
                    self.acc.fetch_weights()
                self.ours.to("cuda")
        else:
            self.ours.to("cuda")

    def bypass(self) -> None:
        if self.hook is None:
            self.hook = self.hooked().register_forward_hook(lambda module, given, result: result)
        else:
            self.hook.remove()
            self.hook = None

    def switch(self) -> None:
        self.acc.configure(OFF if self.acc.config.eight_bits else CARD)
        assert self.acc.config.eight_bits or self.is_whole()

    def generation(self) -> None:
        self.acc.new_generation()
