"""`python -m sfast_ext`."""

from __future__ import annotations

import io
import sys

from sfast_ext.cli import main

for stream in (sys.stdout, sys.stderr):
    # a pipe of Windows has a code page that lacks some of what is printed
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
sys.exit(main())
