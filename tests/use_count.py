"""Whether torch tells who else uses a tensor's memory; see `sfast_ext.weights.external_refs`."""

from __future__ import annotations

import pytest

from sfast_ext.weights.external_refs import ALONE

counted = pytest.mark.skipif(not ALONE, reason="this torch does not tell who else uses a tensor's memory")
"""For tests in which a host keeps a tensor that shares memory with a weight."""
