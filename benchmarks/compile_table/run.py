"""Compiles what UNets launch by each Triton, for cards that need not be there: docs/generated/triton.md.

python -m benchmarks.compile_table                                      # every version, size and dtype
python -m benchmarks.compile_table --triton 2.1.0 --dtype float16       # results of others stay as they are
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import marks, records
from benchmarks.compile_table import compiler as triton_compiler
from sfast_ext.kernels.backend import triton_versions

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "triton-compile.json", ROOT / "docs" / "generated" / "triton.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"
# and the torch that brings it
VERSIONS = {
    "2.1.0": "2.1",
    "2.2.0": "2.2",
    "2.3.1": "2.3",
    "3.0.0": "2.4",
    "3.1.0": "2.5",
    "3.2.0": "2.6",
    "3.3.1": "2.7",
    "3.4.0": "2.8",
    "3.5.1": "2.9",
    "3.7.1": "2.13",
    "3.9.0": "–",
}
CASES = ("sd15:512x512", "sd15:904x520", "sd15:1024x1024", "sd21:768x768", "sdxl:1024x1024")
DTYPES = ("float16", "bfloat16", "float32")

Launches = dict[str, dict[str, list[dict[str, Any]]]]
"""By dtype and capability, what the child process compiles."""


def compile_all(launches: Launches) -> dict[str, Any]:
    """By dtype and capability: how many launches there are, how many compile, and kernels that fail with a reason; or
    why no kernel is used there. Of the Triton that is imported, for each capability that it knows."""
    found: dict[str, Any] = {}
    version = triton_compiler.version()
    for dtype, by_capability in launches.items():
        found[dtype] = {}
        for capability in triton_compiler.capabilities(version):
            wanted = by_capability[str(capability)]
            refused = triton_versions.unsupported(version, divmod(capability, 10), getattr(torch, dtype))
            if refused is not None:
                found[dtype][str(capability)] = {"refused": refused}
                continue
            failed: dict[str, str] = {}
            count, most = 0, 0
            for launch in wanted:
                try:
                    shared = _compile(launch, capability)
                except Exception as exc:
                    failed.setdefault(_name(launch), _reason(exc))
                    continue
                count, most = count + 1, max(most, shared)
            row = {"launches": len(wanted), "compiled": count, "shared": most, "failed": failed}
            found[dtype][str(capability)] = row
    return found


def _name(launch: dict[str, Any]) -> str:
    return f"{launch['home'].rpartition('.')[2]}.{launch['name']}"


def _reason(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[-1][:200]}" if lines else type(exc).__name__


def _compile(launch: dict[str, Any], capability: int) -> int:
    kernel = getattr(importlib.import_module(launch["home"]), launch["name"])
    operands = launch["types"], launch["constants"], capability, launch["divisible"]
    shared, limit = triton_compiler.compiled(kernel, *operands).shared, triton_compiler.SHARED[capability]
    if shared > limit:
        raise MemoryError(f"{shared} bytes of shared memory, of which the card has {limit}")
    return shared


def wheel(version: str, folder: Path) -> Path:
    """Where a version of Triton lies, unpacked; installed first where it does not.

    Raises:
        SystemExit: there is no such wheel for this Python.
    """
    home = folder / version
    if not (home / "triton").is_dir():
        options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--target", str(home)]
        pip = [sys.executable, "-m", "pip", "install", *options, f"triton=={version}"]
        if subprocess.run(pip).returncode:
            python = ".".join(map(str, sys.version_info[:2]))
            sys.exit(f"pip installed no Triton {version} for Python {python}; 2.1.0 has no wheel after Python 3.11")
    return home


def child(version: str, folder: Path, launches: Launches) -> dict[str, Any]:
    """`compile_all` in a process with another Triton in front of the installed one."""
    from sfast_ext.kernels.backend import triton_runtime

    paths = [str(ROOT)]
    if not (triton_runtime.AVAILABLE and triton_runtime.triton.__version__ == version):
        paths.insert(0, str(wheel(version, folder).resolve()))
    with tempfile.TemporaryDirectory() as cache:
        given, out = Path(cache, "launches.json"), Path(cache, "out.json")
        given.write_text(json.dumps(launches), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "benchmarks.compile_table", "--child", str(given), str(out)]
        done = subprocess.run(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"the process with Triton {version} failed:\n{done.stderr[-2000:]}")
        result = json.loads(out.read_text(encoding="utf-8"))
    if result.pop("triton") != version:
        sys.exit(f"{paths[0]} holds no Triton {version}")
    return result["dtypes"]


def nothing_compiled(results: dict[str, Any]) -> list[str]:
    """The versions of Triton, with capability and dtype, that compile none of the launches."""
    return [
        f"Triton {version}, capability {capability}, {dtype}"
        for version, dtypes in results.items()
        for dtype, rows in dtypes.items()
        for capability, row in rows.items()
        if "refused" not in row and not row["compiled"]
    ]


def render(results: dict[str, Any]) -> str:
    """The table, and the reasons of kernels that fail."""
    columns = [str(capability) for capability in triton_compiler.SHARED]
    lines: list[Sequence[str]] = [["dtype", "Triton", "torch", *columns], ["---"] * (3 + len(columns))]
    for dtype in DTYPES:
        lines += _rows(results, dtype, columns)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([_launches(results), table, _failures(results)])


def _rows(results: dict[str, Any], dtype: str, columns: Sequence[str]) -> list[list[str]]:
    lines: list[list[str]] = []
    for version, brought_by in VERSIONS.items():
        if dtype in results.get(version, {}).get("dtypes", {}):
            rows = results[version]["dtypes"][dtype]
            line = [dtype, version, brought_by, *(_cell(rows.get(capability)) for capability in columns)]
            if lines and lines[-1][3:] == line[3:]:
                # a row for all versions in sequence that compile the same
                _, versions, torches, *_ = lines.pop()
                line[1:3] = f"{versions}, {version}", torches if brought_by == "–" else f"{torches}, {brought_by}"
            lines.append(line)
    return lines


def _launches(results: dict[str, Any]) -> str:
    of_cases: dict[str, list[str]] = {}
    for dtype in DTYPES:
        cases = {tuple(each["cases"][dtype]) for each in results.values() if dtype in each.get("cases", {})}
        what = "; ".join(sorted(", ".join(each) for each in cases)) or "nothing yet"
        of_cases.setdefault(what, []).append(dtype)
    return "\n".join(f"Launches in {', '.join(dtypes)} are of {what}." for what, dtypes in of_cases.items())


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if "refused" in row:
        return "not used"
    told = f"{row['compiled']} of {row['launches']}"
    return told + (f", not {', '.join(sorted(row['failed']))}" if row["failed"] else "")


def _failures(results: dict[str, Any]) -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    unused: dict[str, list[str]] = {}
    for version, entry in results.items():
        for dtype, rows in entry["dtypes"].items():
            for capability, row in rows.items():
                if "refused" in row:
                    versions = unused.setdefault(row["refused"].removeprefix(f"Triton {_minor(version)} "), [])
                    if version not in versions:
                        versions.append(version)
                    continue
                for kernel, reason in row["failed"].items():
                    found.setdefault((version, dtype, capability), []).append(f"{kernel}: `{reason}`")
    told = [
        f"- Triton {version}, {dtype}, {capability}: {'; '.join(reasons)}"
        for (version, dtype, capability), reasons in found.items()
    ]
    for reason, (first, *others) in unused.items():
        same = f"; the same of {', '.join(map(_minor, others))}" if others else ""
        told.append(f"- Not used: Triton {_minor(first)} {reason}{same}")
    return "### What does not compile\n\n" + ("\n".join(told) or "Nothing of the above.")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(marks.replaced(text, BEGIN, END, render(results)), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """Compile, and write results and page; 1 where a version compiles nothing for a capability and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="append", choices=VERSIONS, help="a version (default: all)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--case", action="append", metavar="MODEL:WIDTHxHEIGHT", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--child", nargs=2, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.child:
        launches = json.loads(Path(args.child[0]).read_text(encoding="utf-8"))
        from sfast_ext.kernels.backend import triton_runtime

        result = {"triton": triton_runtime.triton.__version__, "dtypes": compile_all(launches)}
        Path(args.child[1]).write_text(json.dumps(result), encoding="utf-8")
        return 0
    from benchmarks.compile_table import launches as collected

    cases, dtypes = args.case or list(CASES), args.dtype or list(DTYPES)
    folder = Path(os.environ.get("TRITON_WHEELS") or ROOT / ".triton")
    wanted = {dtype: collected.collect(cases, dtype) for dtype in dtypes}
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for version in args.triton or VERSIONS:
        entry = results.setdefault(version, {"dtypes": {}, "cases": {}})
        entry["dtypes"] |= child(version, folder, wanted)
        entry["cases"] |= dict.fromkeys(dtypes, cases)
        results = {name: results[name] for name in VERSIONS if name in results}
        records.write(RESULTS, results)
        write_page(results)
        print(f"Triton {version}: done", flush=True)
    missing = nothing_compiled({version: entry["dtypes"] for version, entry in results.items()})
    for line in missing:
        print(f"nothing compiles: {line}", file=sys.stderr)
    return 1 if missing else 0
