"""Which tests `make quick` runs: those of the rules of the house, and those of what changed.

Changed is what differs from the branch that this one follows, or from the last commit if it follows none, and what git
does not know yet. A file of `sfast_ext` has the tests of the same name first, then those of the folder that mirrors its
own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("tests/test_rooms.py", "tests/kernels/test_registry.py", "tests/passes/test_order.py")


def selected(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Files and folders of tests, relative to the root: `ALWAYS`, then files, then folders."""
    files, folders = [], []
    for name in changed:
        path = Path(name)
        if path.parts[0] == "tests":
            if path.name.startswith("test_") and path.suffix == ".py":
                files.append(path)
            elif len(path.parts) > 2:
                folders.append(path.parent)
        elif path.parts[0] in ("sfast_ext", "benchmarks") and path.suffix == ".py":
            below = path.parts[1:] if path.parts[0] == "sfast_ext" else path.parts
            mirror = Path("tests", *below)
            files.append(mirror.with_name(f"test_{mirror.name}"))
            if len(below) > 1:
                folders.append(mirror.parent)
    chosen = [p.as_posix() for p in files if (root / p).is_file()]
    chosen += [p.as_posix() for p in folders if any((root / p).glob("test_*.py"))]
    return list(dict.fromkeys([*ALWAYS, *chosen]))


def changed() -> list[str]:
    """The files that changed, relative to the root."""
    base = _git("merge-base", "HEAD", "@{upstream}") or ["HEAD"]
    return [*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


if __name__ == "__main__":
    print(*selected(changed()))
