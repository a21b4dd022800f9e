"""What was measured on a GPU, for a person."""

from __future__ import annotations

from collections.abc import Iterable

from sfast_ext.kernels.backend.choices import OWN, Choice
from sfast_ext.tools.text import number, table


def rows(found: dict[str, dict[str, Choice]]) -> list[list[str]]:
    """What was chosen for each shape, and how many times faster than without a choice, the most gained first."""
    lines = []
    for what, keys in found.items():
        for key, choice in keys.items():
            own, best = choice.milliseconds.get(OWN), choice.milliseconds.get(choice.name)
            gain = own / best if own and best else 1.0
            lines.append(
                (
                    gain,
                    [
                        f"{what} {key.rpartition(' of ')[0].partition(';')[0]}",
                        choice.name,
                        number(best, 3),
                        number(gain, 2),
                    ],
                )
            )
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])]


def report(found: dict[str, dict[str, Choice]]) -> Iterable[str]:
    """The lines that the command prints."""
    lines = rows(found)
    if not lines:
        yield "Nothing is measured: there is one way for each operation here."
        return
    yield table(("shapes", "chosen", "ms", "times faster"), lines)
