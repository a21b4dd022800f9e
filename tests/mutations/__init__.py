"""Conditions that keep a stale or wrong plan from running, each with a change that takes it away and the tests that
notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """`source` is what stands once in `sfast_ext/{file}`; `mutant` is to be put in its place."""

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
        if text.count(self.source) != 1:
            raise ValueError(f"{self.file} has {text.count(self.source)} times {self.source!r}")
        return text.replace(self.source, self.mutant)


def every() -> list[Mutation]:
    """All of them, in the order of a call."""
    from mutations import calls, files, forges, graphs, probes, programs, proof, recorded, weights

    return [
        *calls.MUTATIONS,
        *proof.MUTATIONS,
        *weights.MUTATIONS,
        *graphs.MUTATIONS,
        *recorded.MUTATIONS,
        *programs.MUTATIONS,
        *forges.MUTATIONS,
        *probes.MUTATIONS,
        *files.MUTATIONS,
    ]
