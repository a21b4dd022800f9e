"""The CUDA driver and NVRTC of this machine. Nothing has to be installed: torch brings NVRTC, the driver is there."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

from sfast_ext.kernels.backend import cuda_libraries
from sfast_ext.kernels.backend.cuda_driver import Driver
from sfast_ext.kernels.backend.nvrtc_library import Nvrtc

logger = logging.getLogger("sfast_ext")


class Bindings(NamedTuple):
    driver: Driver | None
    """None on a machine without one."""
    nvrtc: Nvrtc | None
    """None where it was not found, see `missing`."""


@functools.lru_cache(maxsize=None)
def bindings() -> Bindings:
    """What there is."""
    compiler = missing() is None
    try:
        driver = Driver(cuda_libraries.driver())
    except Exception as exc:  # a library may lack a function
        logger.debug("no CUDA driver: %s", exc)
        driver = None
    return Bindings(driver, Nvrtc(cuda_libraries.nvrtc()) if compiler else None)


@functools.lru_cache(maxsize=None)
def missing() -> str | None:
    """Why there is no NVRTC; None where there is."""
    try:
        Nvrtc(cuda_libraries.nvrtc()).version()
    except Exception as exc:
        return str(exc)
    return None
