"""The host's package as of August 2026: what differs from July's, in front of the rest of it."""

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).parents[2] / "sdnext_root" / "modules")]
