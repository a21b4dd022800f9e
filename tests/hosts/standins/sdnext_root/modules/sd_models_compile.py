"""The host's own compilation; only what an extension can see of it."""

from __future__ import annotations

from typing import Any

deepcache_worker: Any = None
