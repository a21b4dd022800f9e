"""One image at a time."""

from __future__ import annotations

import threading

queue_lock = threading.Lock()
