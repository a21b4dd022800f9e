"""`python -m sfast_ext build`: compiles the native operations, which are optional."""

from __future__ import annotations

import sys
import time

from sfast_ext import native


def main() -> int:
    """Builds and loads them; 1 where that fails, and says why."""
    begin = time.perf_counter()
    try:
        library = native.build()
    except (native.BuildError, OSError) as exc:
        print(f"Not built. Nothing misses them, PyTorch's own operations run in their place.\n{exc}", file=sys.stderr)
        return 1
    print(f"{library} ({time.perf_counter() - begin:.1f} s)")
    if not native.load():
        print(f"It is built but does not load: {native.describe()['error']}", file=sys.stderr)
        return 1
    return 0
