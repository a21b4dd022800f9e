"""The script that the WebUI loads: it finds the adapter of this WebUI and starts it."""

from __future__ import annotations

from sfast_ext import __version__, hosts

adapter = hosts.find()
if adapter is None:
    known = "AUTOMATIC1111 1.10, SD.Next, Forge Neo and Forge Classic are"
    print(f"Stable Fast {__version__} does nothing: this WebUI is not supported. {known}.")
else:
    adapter.start(__version__)
    PerRequest = hosts.script_of(adapter)
