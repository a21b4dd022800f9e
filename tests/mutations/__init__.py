"""Conditions that keep a stale or wrong plan from running, each with a change that takes it away and the tests that
notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_TOKEN = re.compile(r"\w+|[^\w\s]")


class Mutation(NamedTuple):
    """`source` is what stands once in `sfast_ext/{file}`, compared token by token, so that white space does not count.
    `mutant` is to be put in its place."""

    what: str
    file: str
    source: str
    mutant: str
    tests: tuple[str, ...]

    def mutated(self, root: Path = ROOT) -> str:
        """The text of the file with the mutation.

        Raises:
            ValueError: the source is not there exactly once.
        """
        text = (root / "sfast_ext" / self.file).read_text(encoding="utf-8")
        spans = _spans(text, self.source)
        if len(spans) != 1:
            raise ValueError(f"{self.file} has {len(spans)} times {self.source!r}")
        start, end = spans[0]
        return text[:start] + self.mutant.strip() + text[end:]


def _spans(text: str, source: str) -> list[tuple[int, int]]:
    """Where the tokens of `source` stand in `text`, one after the other."""
    wanted = _TOKEN.findall(source)
    found = list(_TOKEN.finditer(text))
    words = [match.group() for match in found]
    starts = [i for i, word in enumerate(words) if word == wanted[0] and words[i : i + len(wanted)] == wanted]
    return [(found[i].start(), found[i + len(wanted) - 1].end()) for i in starts]


def every() -> list[Mutation]:
    """All of them, in the order of a call."""
    from mutations import (
        arguments,
        calls,
        convolutions8,
        effects,
        eight_bits,
        files,
        forge_first,
        forges,
        graphs,
        hosts,
        lean_calls,
        memory,
        pages,
        probes,
        products8,
        programs,
        proof,
        quantised,
        recorded,
        resident,
        states,
        texts,
        transformer_passes,
        transformers,
        values,
        weights,
        whole_unets,
    )

    return [
        *calls.MUTATIONS,
        *arguments.MUTATIONS,
        *effects.MUTATIONS,
        *states.MUTATIONS,
        *values.MUTATIONS,
        *proof.MUTATIONS,
        *weights.MUTATIONS,
        *graphs.MUTATIONS,
        *recorded.MUTATIONS,
        *quantised.MUTATIONS,
        *programs.MUTATIONS,
        *probes.MUTATIONS,
        *products8.MUTATIONS,
        *convolutions8.MUTATIONS,
        *forges.MUTATIONS,
        *files.MUTATIONS,
        *hosts.MUTATIONS,
        *memory.MUTATIONS,
        *pages.MUTATIONS,
        *eight_bits.MUTATIONS,
        *resident.MUTATIONS,
        *lean_calls.MUTATIONS,
        *forge_first.MUTATIONS,
        *whole_unets.MUTATIONS,
        *texts.MUTATIONS,
        *transformers.MUTATIONS,
        *transformer_passes.MUTATIONS,
    ]
