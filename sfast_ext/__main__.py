"""`python -m sfast_ext`."""

from __future__ import annotations

import sys

from sfast_ext.cli import main

sys.exit(main())
