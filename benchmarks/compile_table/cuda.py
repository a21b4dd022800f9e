"""Compiles the kernels in CUDA C++ for any card by each NVRTC, without that card: docs/generated/cuda.md.

python -m benchmarks.compile_table.cuda                    # every NVRTC
python -m benchmarks.compile_table.cuda --nvrtc 12.1.105   # results of others stay as they are
python -m benchmarks.compile_table.cuda --only mma_gemm8   # as do those of other kernels

Constants are those of the launches of whole UNets without Triton; of products in 8 bits, which a plan has by a setting,
all that there can be with the default GELU. Registers, spills and shared memory are what the
compiler says. Occupancy follows from them and from the card's limits (CUDA C++ Programming Guide, "Compute
Capabilities").
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import marks, records
from benchmarks.compile_table import launches
from sfast_ext import kernels
from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.backend import cuda_libraries, nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.backend.nvrtc_library import Nvrtc
from sfast_ext.kernels.eight_bits import MIN_CAPABILITY, mma8_tiles, mma_attention8, mma_conv8, mma_gemm8
from sfast_ext.kernels.linear import mma_gemm, mma_tiles

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cuda-compile.json", ROOT / "docs" / "generated" / "cuda.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"
PACKAGES = {
    "12.1.105": "nvidia-cuda-nvrtc-cu12",
    "12.8.93": "nvidia-cuda-nvrtc-cu12",
    "13.0.88": "nvidia-cuda-nvrtc",
}
CASES = ("sd15:512x512", "sdxl:1024x1024")
DTYPES = ("float16", "bfloat16", "float32")
REGISTERS, LARGEST_REGISTER_UNIT = 65536, 256
_PRODUCTS = (mma_gemm8._SOURCE.name, mma_conv8.SOURCE.name)
_ATTENTION, _KEYS = (source.name for source in mma_attention8.SOURCES)
_IN_8_BITS = (*_PRODUCTS, _ATTENTION, _KEYS)
_HEADS = (40, 64, 80, 128, 160)


class Card(NamedTuple):
    """Limits of a multiprocessor: resident threads and blocks, bytes of shared memory, and those of one block."""

    threads: int
    blocks: int
    shared: int
    shared_of_block: int


CARDS = {
    70: Card(2048, 32, 96 << 10, 96 << 10),
    75: Card(1024, 16, 64 << 10, 64 << 10),
    80: Card(2048, 32, 164 << 10, 163 << 10),
    86: Card(1536, 16, 100 << 10, 99 << 10),
    89: Card(1536, 24, 100 << 10, 99 << 10),
    90: Card(2048, 32, 228 << 10, 227 << 10),
    100: Card(2048, 32, 228 << 10, 227 << 10),
    120: Card(1536, 24, 100 << 10, 99 << 10),
}


class Launch(NamedTuple):
    """What is compiled, and the block that it is launched with."""

    name: str
    constants: tuple[tuple[str, int], ...]
    threads: int
    shared: int
    """Bytes of dynamic shared memory."""
    least: int = min(CARDS)
    """The oldest of CARDS that it is for."""


def collect(cases: Sequence[str], dtypes: Sequence[str]) -> list[Launch]:
    """The launches that differ, of cases such as "sd15:512x512", on any of CARDS; not those for Hopper alone."""
    records = kernels.registered().values()
    portable = {id(s) for record in records if record.portable for s in record.cuda_sources}
    sources = {id(s) for record in records for s in record.cuda_sources if not s.hopper}
    found: dict[Launch, Launch] = {}
    with for_any_card():
        for dtype in dtypes:
            for case in cases:
                with mock.patch.object(mma_gemm, "supported", lambda device, dtype: True):
                    calls = launches._calls(case, getattr(torch, dtype), triton=False)
                calls += launches.of_eight_bits(getattr(torch, dtype)) + launches.of_transformers(getattr(torch, dtype))
                for capability in launches.MULTIPROCESSORS:
                    with launches._card(capability):
                        made = size_prediction.launched(calls, launches._GPU).values()
                    for each in made:
                        if id(each.kernel) in sources:
                            launch = described(each)
                            # what needs tensor cores is for the first card on which it was met, and later ones
                            least = launch.least if id(each.kernel) in portable else capability
                            launch = launch._replace(least=least)
                            if any(launched_on(launch, card) for card in CARDS):
                                found.setdefault(launch._replace(least=min(CARDS)), launch)
                print(f"{case}, {dtype}: {len(found)} launches", file=sys.stderr, flush=True)
    return sorted(found.values())


def in_8_bits() -> list[Launch]:
    """All launches of `mma_gemm8` and `mma_conv8`, on any of CARDS; attentions of heads that models have."""
    found = set()
    for card in CARDS:
        for tile in mma8_tiles.shapes(divmod(card, 10)) if divmod(card, 10) >= MIN_CAPABILITY else ():
            for dtype, kind in itertools.product((torch.float16, torch.bfloat16), range(3)):
                pairs = kind == mma_gemm.GEGLU
                if not pairs or tile.width // tile.across // 8 % 2 == 0:
                    given = mma_gemm8.constants(tile, dtype, mma_gemm.Epilogue(kind))
                    constants = tuple(sorted(given.items()))
                    shared = mma8_tiles.shared_bytes(tile, pairs)
                    found.add(Launch(mma_gemm8._SOURCE.name, constants, tile.threads, shared, 75))
                if not pairs:
                    constants = tuple(sorted(mma_conv8.constants(tile, dtype, kind == mma_gemm.RESIDUAL).items()))
                    shared = mma_conv8.shared_bytes(tile)
                    found.add(Launch(mma_conv8.SOURCE.name, constants, tile.threads, shared, 75))
    for size, dtype, rows in itertools.product(_HEADS, (torch.float16, torch.bfloat16), (1, 10**6)):
        least, shape = 80 if dtype == torch.bfloat16 else 75, mma_attention.shape(size, 4096, rows, 28)
        constants = tuple(sorted(mma_attention8.constants(size, shape, dtype).items()))
        found.add(Launch(_ATTENTION, constants, 32 * shape.warps, mma_attention8.shared_bytes(size, shape), least))
        constants = tuple(sorted(mma_attention8.keys_constants(size, dtype).items()))
        found.add(Launch(_KEYS, constants, mma_attention8.THREADS, 0, least))
    return sorted(found)


def with_faster_sums(launch: Launch, capability: int) -> Launch | None:
    """The launch as the setting *Faster sums on GeForce* makes it on a card; None where that is the same."""
    given, card = dict(launch.constants), divmod(capability, 10)
    if given.get("HALF_SUMS") != 0 or given["TYPE"] or card not in mma_gemm.GEFORCE:
        return None
    if launch.name == mma_gemm._SOURCE.name:
        exact, in_half = (mma_tiles.shapes(card, half_sums) for half_sums in (False, True))
        tile = in_half[exact.index(mma_gemm.tile_of(given))]
        given = {**given, **mma_gemm.of_tile(tile), "HALF_SUMS": 1}
        shared = mma_tiles.shared_bytes(tile, given["EPILOGUE"] == mma_gemm.GEGLU)
        return launch._replace(constants=tuple(sorted(given.items())), threads=tile.threads, shared=shared)
    if given.get("ONCE"):
        return None
    size = given["SIZE"]
    if size > mma_attention.MAX_SIZE_IN_HALF:
        return None
    shape = mma_attention.Shape(given["KEYS"], given["TILES"], given["WARPS"], given["BLOCKS"])
    shape = mma_attention.half_sums_shape(shape, size, card)
    module: Any = mma_attention8 if launch.name == _ATTENTION else mma_attention
    given = module.constants(size, shape, torch.float16, half_sums=True)
    shared = module.shared_bytes(size, shape)
    return launch._replace(constants=tuple(sorted(given.items())), threads=32 * shape.warps, shared=shared)


def launched_on(launch: Launch, capability: int) -> bool:
    """Whether a card of this capability may launch it."""
    if launch.name == mma_gemm._SOURCE.name:
        given, card = dict(launch.constants), divmod(capability, 10)
        if card not in mma_gemm.CARDS:
            return False
        if mma_gemm.tile_of(given) not in mma_tiles.shapes(card, bool(given["HALF_SUMS"])):
            return False
    if launch.name in _PRODUCTS:
        tile = mma_gemm.tile_of(dict(launch.constants))
        return launch.least <= capability and tile in mma8_tiles.shapes(divmod(capability, 10))
    return launch.least <= capability


@contextmanager
def for_any_card() -> Iterator[None]:
    """Within, Triton is missing, and what needs no Hopper is available."""
    available = mock.patch.object(nvrtc.Source, "supported", lambda source, device: not source.hopper)
    with triton_runtime.without_triton(), available:
        yield


def described(launch: size_prediction.Launch) -> Launch:
    """A launch with the block that its source prepares."""
    _, threads, shared = launch.kernel.prepare(*launch.args, **launch.constants)
    return Launch(launch.kernel.name, tuple(sorted(launch.constants.items())), threads, shared)


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """Registers, bytes of spill stores, bytes of shared memory and occupancy of a launch on a card.

    Raises:
        Unavailable: it does not compile.
    """
    source = (nvrtc.SOURCES / f"{launch.name}.cu").read_bytes()
    _, log = nvrtc.build(source, f"sm_{capability}", dict(launch.constants))
    registers, spills = _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)
    shared = launch.shared + _number(r"(\d+) bytes smem", log)
    return {
        "registers": registers,
        "spills": spills,
        "shared": shared,
        "occupancy": occupancy(CARDS[capability], launch.threads, registers, shared),
    }


def _number(text: str, log: str) -> int:
    found = re.search(text, log)
    return int(found[1]) if found else 0


def occupancy(card: Card, threads: int, registers: int, shared: int) -> float:
    """Resident threads of the most that a multiprocessor has; 0 where a block does not fit."""
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // LARGEST_REGISTER_UNIT) * LARGEST_REGISTER_UNIT
    if shared > card.shared_of_block:
        return 0.0
    blocks = min(card.blocks, card.threads // (32 * warps), REGISTERS // (of_warp * warps))
    if shared:
        blocks = min(blocks, card.shared // (shared + 1024 if card.shared > card.shared_of_block else shared))
    return round(blocks * 32 * warps / card.threads, 3)


def compile_all(wanted: Iterable[Launch]) -> dict[str, Any]:
    """By capability and kernel, the worst of its launches; of the NVRTC that is loaded, for the cards that it knows."""
    wanted, found = list(wanted), {}
    _, known = nvrtc.targets() or ("", ())
    for capability in CARDS:
        if capability not in known:
            continue
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for_it = [launch for launch in wanted if launched_on(launch, capability)]
            for_it += sorted({each for launch in for_it if (each := with_faster_sums(launch, capability))})
            made = list(pool.map(functools.partial(compiled, capability=capability), for_it))
        rows: dict[str, dict[str, Any]] = {}
        for launch, told in zip(for_it, made):
            faster = dict(launch.constants).get("HALF_SUMS")
            row = rows.setdefault(f"{launch.name}, faster sums" if faster else launch.name, {"launches": 0, **told})
            row["launches"] += 1
            row["occupancy"] = min(row["occupancy"], told["occupancy"])
            for name in ("registers", "spills", "shared"):
                row[name] = max(row[name], told[name])
        found[str(capability)] = rows
    return found


def library(version: str, folder: Path) -> Path:
    """The folder of an NVRTC, installed first where it is not there."""
    home = folder / version
    if not home.is_dir():
        package = f"{PACKAGES[version]}=={version}"
        options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--target", str(home)]
        if subprocess.run([sys.executable, "-m", "pip", "install", *options, package]).returncode:
            sys.exit(f"pip installed no {package}")
    return next(file.parent for file in sorted(home.glob("nvidia/*/lib/libnvrtc.so*")))


def use(folder: Path) -> None:
    """Compile by the NVRTC of a folder in this process."""
    # a torch with CUDA takes none of another major version
    beside_any = mock.patch.object(torch.version, "cuda", None)
    with beside_any, mock.patch.object(cuda_libraries, "folders", lambda: [folder]):
        cuda_libraries.nvrtc.cache_clear()
        Nvrtc(cuda_libraries.nvrtc()).version()


def render(results: dict[str, Any]) -> str:
    """One table: a row for each kernel, a column for each card, in a cell what all NVRTC make of it."""
    cards = sorted({card for by_card in results.values() for card in by_card}, key=int)
    names = sorted({name for by_card in results.values() for rows in by_card.values() for name in rows})
    lines = [["Kernel", "launches", "shared memory, KB", *cards], ["---"] * (3 + len(cards))]
    for name in names:
        by_card = [
            {version: found[card][name] for version, found in results.items() if name in found.get(card, {})}
            for card in cards
        ]
        rows = [row for made in by_card for row in made.values()]
        shared = _range([row["shared"] / 1024 for row in rows], ".1f")
        lines.append([f"`{name}`", str(max(row["launches"] for row in rows)), shared, *map(_cell, by_card)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"NVRTC {', '.join(results)}.\n\n{table}"


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


def _cell(made: dict[str, dict[str, Any]]) -> str:
    if not made:
        return "–"
    registers = _range([row["registers"] for row in made.values()], "d")
    occupancy = f"{100 * min(row['occupancy'] for row in made.values()):.0f}"
    spilled = [f"**{row['spills']} spilled** by {version}" for version, row in made.items() if row["spills"]]
    return ", ".join([f"{registers} / {occupancy}", *spilled])


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(marks.replaced(text, BEGIN, END, render(results)), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """Compile, and write results and page; 1 where a launch has no room on a card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", action="append", choices=PACKAGES, help="a version (default: all)")
    parser.add_argument("--only", metavar="KERNEL", help="one kernel (default: all)")
    parser.add_argument("--child", nargs=3, metavar="X", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.child:
        folder, wanted, out = map(Path, args.child)
        use(folder)
        read = json.loads(wanted.read_text(encoding="utf-8"))
        made = compile_all(Launch(n, tuple((k, v) for k, v in c), *rest) for n, c, *rest in read)
        out.write_text(json.dumps(made), encoding="utf-8")
        return 0
    folder = Path(os.environ.get("NVRTC_WHEELS") or ROOT / ".nvrtc")
    folder.mkdir(exist_ok=True)
    wanted, out = folder / "launches.json", folder / "out.json"
    launches_of_all = in_8_bits()
    if args.only not in _IN_8_BITS:
        launches_of_all += collect(CASES, DTYPES)
    chosen = [launch for launch in launches_of_all if args.only in (None, launch.name)]
    wanted.write_text(json.dumps(chosen), encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for version in args.nvrtc or PACKAGES:
        # another process: a library that is loaded stays
        child = ["--child", str(library(version, folder)), str(wanted), str(out)]
        subprocess.run([sys.executable, "-m", "benchmarks.compile_table.cuda", *child], check=True, cwd=ROOT)
        made, before = json.loads(out.read_text(encoding="utf-8")), results.get(version, {})
        results[version] = {card: (before.get(card, {}) if args.only else {}) | rows for card, rows in made.items()}
        results = {name: results[name] for name in PACKAGES if name in results}
        records.write(RESULTS, results)
        write_page(results)
        print(f"NVRTC {version}: done", flush=True)
    crowded = [
        f"{name} on {card} by NVRTC {version}"
        for version, cards in results.items()
        for card, rows in cards.items()
        for name, row in rows.items()
        if not row["occupancy"]
    ]
    for line in crowded:
        print(f"no room: {line}", file=sys.stderr)
    return 1 if crowded else 0


if __name__ == "__main__":
    raise SystemExit(main())
