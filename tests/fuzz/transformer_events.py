"""What happens to a transformer alone: prompts of other lengths, tables that are written, replaced and made anew."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from fuzz.world import Event, World


def prompt_lengths(w: World, rng: random.Random) -> None:
    """Prompts of other lengths, in tensors of the same size."""
    w.request = replace(w.request, missing=rng.randrange(4))


def table_written(w: World, rng: random.Random) -> None:
    """The host writes to a table, in inference mode or not."""
    angle, row, inference = rng.uniform(0, 3), rng.randrange(8), rng.random() < 0.5
    turn = torch.polar(torch.ones(()), torch.tensor(angle))

    def write(model):
        for table in model.rope.tables or ():
            table[row:].mul_(turn.to(table.device))

    # torch refuses to write to one that a forward made in inference mode, unless that is on
    made_there = any(table.is_inference() for table in w.twin.rope.tables or ())
    with torch.inference_mode(inference or made_there):
        w.both(write)


def table_replaced(w: World, rng: random.Random) -> None:
    """Another table, in the same list or in another."""
    angle, same = rng.uniform(0, 3), rng.random() < 0.5
    turn = torch.polar(torch.ones(()), torch.tensor(angle))

    def put(model):
        tables = model.rope.tables
        if tables and same:
            tables[0] = tables[0] * turn.to(tables[0].device)
        elif tables:
            model.rope.tables = [table * turn.to(table.device) for table in tables]

    w.both(put)
    w.behaves_otherwise()


def table_dropped(w: World, rng: random.Random) -> None:
    """The next call makes the tables anew."""
    w.both(lambda model: setattr(model.rope, "tables", None))
    w.behaves_otherwise()


EVENTS: dict[Event, int] = {prompt_lengths: 5, table_written: 5, table_replaced: 2, table_dropped: 2}
