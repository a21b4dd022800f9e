"""Whole images in a real WebUI: `python -m benchmarks.webui`."""

from benchmarks.webui.images import main

raise SystemExit(main())
