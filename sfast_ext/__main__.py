"""`python -m sfast_ext`, and `python path/to/sfast_ext`, which works in every folder."""

from __future__ import annotations

import io
import sys
from pathlib import Path

for stream in (sys.stdout, sys.stderr):
    # a pipe of Windows has a code page that lacks some of what is printed
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
if not __package__:
    # as a path, Python finds what is in this folder, and not the package
    sys.path[0] = str(Path(__file__).absolute().parents[1])

from sfast_ext.cli import interpreter, main  # noqa: E402

_why = interpreter.too_old(sys.version_info[:2])
if _why is not None:
    print(f"python -m sfast_ext: error: {_why}", file=sys.stderr)
    sys.exit(2)
sys.exit(main())
