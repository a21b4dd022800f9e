"""The inner loop of a kernel's machine code, and what bounds it on a GeForce: the tensor cores or the instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.cards.published import CLOCKS

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)$")
_PRODUCTS = ("HMMA", "IMMA")
_LABEL = re.compile(r"^(\.L_x_\d+):")


class Loop(NamedTuple):
    """Instructions of a warp in one turn: all, those of the tensor cores by the type of their sums, and others."""

    instructions: int
    sums_in_float32: int
    sums_in_float16: int
    special: int
    ldmatrix: int
    integers: int = 0
    """Of the tensor cores, of 8-bit integers."""

    @property
    def tensor_clocks(self) -> int:
        """For which a scheduler's tensor core is busy."""
        of_floats = CLOCKS["HMMA"] * self.sums_in_float32 + CLOCKS["HMMA"] // 2 * self.sums_in_float16
        return of_floats + CLOCKS["IMMA"] * self.integers

    @property
    def clocks(self) -> int:
        """The least of a turn: of the tensor core, the issued instructions, special functions, shared memory."""
        return max(self.tensor_clocks, self.instructions, CLOCKS["MUFU"] * self.special, CLOCKS["LDSM"] * self.ldmatrix)

    @property
    def of_the_tensor_cores(self) -> float:
        """The most of their rate that the loop can reach."""
        return self.tensor_clocks / self.clocks


def disassembled(code: bytes) -> str:
    """What nvdisasm, which Triton's wheels bring, says of machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def main_loop(text: str) -> Loop:
    """The loop with the most instructions of the tensor cores; of two the shorter.

    Raises:
        ValueError: there is none.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    found: list[list[str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif (made := _INSTRUCTION.match(line)) and made[1] != "NOP":
            names.append(made[1])
            target = re.search(r"\.L_x_\d+", made[2]) if made[1].startswith("BRA") else None
            if target and target[0] in labels:
                found.append(names[labels[target[0]] :])
    loops = [loop for loop in found if any(name.startswith(_PRODUCTS) for name in loop)]
    if not loops:
        raise ValueError(
            "No loop with instructions of the tensor cores: is it a kernel with mma.sync, for 8.0 or later?"
        )
    return _counted(max(loops, key=lambda loop: (sum(name.startswith(_PRODUCTS) for name in loop), -len(loop))))


def _counted(names: list[str]) -> Loop:
    kinds = Counter(name.split(".")[0] for name in names)
    in_float16 = sum(name.startswith("HMMA") and name.endswith(".F16") for name in names)
    return Loop(len(names), kinds["HMMA"] - in_float16, in_float16, kinds["MUFU"], kinds["LDSM"], kinds["IMMA"])
