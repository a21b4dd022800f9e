"""Whole pictures in a real WebUI: `python -m benchmarks.webui`."""

from benchmarks.webui.pictures import main

raise SystemExit(main())
