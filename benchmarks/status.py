"""What it costs to ask for the status while images are made: `python -m benchmarks.status`.

The adapter of AUTOMATIC1111 as it is, in the place that its tests make for it, with a real UNet. Two other processes
ask `/sfast/v1/status`, so many times a second together. Images with that and without it follow each other in turns;
the times of their steps are compared. Needs fastapi and uvicorn, which the WebUIs have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.small_cards.hosts import STEP, Host, open_host
from benchmarks.small_cards.parts import NAMES, build
from sfast_ext.tools.lib.machine import describe
from sfast_ext.ui import api

ASK = """
import http.client, mmap, struct, sys, time
file = open(sys.argv[3], "r+b")
counted = mmap.mmap(file.fileno(), 8)
host = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
period, asked, began = 1 / float(sys.argv[2]), 0, time.monotonic()
while True:
    host.request("GET", "/sfast/v1/status")
    assert host.getresponse().read()
    asked += 1
    counted[:] = struct.pack("q", asked)
    time.sleep(max(0, began + asked * period - time.monotonic()))
"""
CONNECTIONS = 2
GPU_CALLS = ("is_available", "mem_get_info", "get_device_properties", "memory_reserved", "memory_stats", "synchronize")


class Asked:
    """How often another process has asked. It counts in a file that both map: a message for each request would wake
    a thread here, which takes time from the images as well."""

    def __init__(self, port: int, rate: float) -> None:
        # named: Windows opens no file twice that goes with its handle
        handle, self._name = tempfile.mkstemp(prefix="sfast-")
        with open(handle, "r+b") as file:
            file.write(bytes(8))
            file.flush()
            self._counted = mmap.mmap(file.fileno(), 8)
        command = [sys.executable, "-c", ASK, str(port), str(rate), self._name]
        self._process = subprocess.Popen(command)

    @property
    def times(self) -> int:
        """Requests answered so far."""
        return int(struct.unpack("q", self._counted[:])[0])

    def wait(self) -> None:
        """Until it has asked once.

        Raises:
            RuntimeError: the process has ended.
        """
        while not self.times:
            if self._process.poll() is not None:
                raise RuntimeError("the process that asks has ended")
            time.sleep(0.01)

    def close(self) -> None:
        """No more."""
        self._process.terminate()
        self._process.wait()
        self._counted.close()
        os.unlink(self._name)


@contextlib.contextmanager
def served(source: api.Source) -> Iterator[int]:
    """The port of a server with the extension's routes, in a thread as in the WebUIs."""
    import fastapi
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    app = fastapi.FastAPI()
    api.register(app, source)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


def steps_s(host: Host, size: int, steps: int) -> float:
    """Seconds of the steps of one image, the GPU's included."""
    began: list[float] = []

    def at(part: str) -> None:
        if (part == STEP and not began) or (part == "the VAE" and len(began) == 1):
            if host.device.type == "cuda":
                torch.cuda.synchronize()
            began.append(time.perf_counter())

    host.image(size, size, steps, at)
    return began[1] - began[0]


def status_ms(session: Any, times: int = 200) -> list[float]:
    """Milliseconds of a status by itself. An assertion fails where it asks the GPU."""
    taken = []
    with contextlib.ExitStack() as stack:
        for name in GPU_CALLS:
            stack.enter_context(mock.patch.object(torch.cuda, name, side_effect=AssertionError(f"{name} was called")))
        for _ in range(times):
            began = time.perf_counter()
            session.status()
            taken.append(1e3 * (time.perf_counter() - began))
    return sorted(taken)


def measured(model: str, size: int, steps: int, pairs: int, rate: float, device: torch.device) -> dict[str, Any]:
    """The row of one model."""
    parts = build(model, device, torch.float16 if device.type == "cuda" else torch.float32)
    host = open_host(parts, device, "none", 0.0, ours=True)
    try:
        session = host.session()
        for _ in range(3):
            steps_s(host, size, steps)
        # the first answer describes the machine
        session.status()
        alone = status_ms(session)
        quiet, asking, rates = [], [], []
        with served(session.source) as port:
            for number in range(pairs):
                for busy in (False, True) if number % 2 else (True, False):
                    if not busy:
                        quiet.append(steps_s(host, size, steps))
                        continue
                    with contextlib.ExitStack() as stack:
                        opened = (contextlib.closing(Asked(port, rate / CONNECTIONS)) for _ in range(CONNECTIONS))
                        asked = [stack.enter_context(each) for each in opened]
                        for each in asked:
                            each.wait()
                        before, began = sum(each.times for each in asked), time.monotonic()
                        asking.append(steps_s(host, size, steps))
                        rates.append((sum(each.times for each in asked) - before) / (time.monotonic() - began))
        faults = host.faults()
    finally:
        host.close()
    ratios = sorted(b / a for a, b in zip(quiet, asking))
    step_ms = {"quiet": 1e3 * statistics.median(quiet) / steps, "asked": 1e3 * statistics.median(asking) / steps}
    return {
        "model": model, "size": size, "steps": steps, "pairs": pairs, "faults": faults,
        "status_ms": {"least": alone[0], "median": statistics.median(alone), "p95": alone[int(0.95 * len(alone))]},
        "asked_per_s": statistics.median(rates),
        "ms_a_step": step_ms,
        "ratio": {"least": ratios[0], "median": statistics.median(ratios), "most": ratios[-1]},
    }  # fmt: skip


def main() -> None:
    """Print one row as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=NAMES, default="sd15" if torch.cuda.is_available() else "tiny-sd15")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    row = measured(given.model, given.size, given.steps, given.pairs, given.rate, torch.device(given.device))
    print(json.dumps({"machine": describe(), **row}, indent=1))


if __name__ == "__main__":
    main()
