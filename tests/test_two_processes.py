"""Two processes of one user, each for its card, share a cache folder: nothing that one keeps is lost to the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfast_ext import cache_folder
from sfast_ext.jobs.measurements import KEPT, Measurements

ROOT = Path(__file__).resolve().parents[1]
START = """
import sys, time
from pathlib import Path

folder, name, gate = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def together():
    (gate / name).touch()
    while len(list(gate.iterdir())) < 2:
        time.sleep(0.001)

"""
ADDED = """
import torch
from sfast_ext.call_signature import flatten_call
from sfast_ext.jobs.kept_calls import KeptCall, KeptCalls
from sfast_ext.jobs.measurements import Measurements
from sfast_ext.kernels.backend import choices
from sfast_ext.preparation import StageTimes
from sfast_ext.ui.requests import Wanted

measured, module = Measurements(lambda: folder), torch.nn.Linear(2, 2)
times = StageTimes(lambda: folder)
times.of("anything")
calls = KeptCalls(lambda: folder)
signature = flatten_call((torch.zeros(1, 4, 8, 8),), {}, torch.device("cpu")).signature
memory = choices.Memory(folder / "choices-x.json", {})
together()
for i in range(20):
    measured.add(module, [{"n": i}], "1", name)
    if i < 3:
        times.record(f"{name} {i}", {"recording": 1.0 + i})
    if i < 6:
        calls.keep(f"{name} {i}", KeptCall(Wanted(64, 64, 1), signature))
    memory.put("attention", f"{name} {i}", choices.Choice("a", {"a": 1.0}))
    memory.save()
"""
READ = """
from sfast_ext import cache_folder, eight_bits, last_start

last_start.FOLDER = lambda: folder
for i in range(50):
    last_start.keep({"lines": [name] * 400})
    eight_bits.keep({"layers": i, "kept": [], "bytes": 0})
    found = last_start.read()
    assert found is not None and len(set(found["lines"])) == 1, found
    assert eight_bits.read() is not None
    if i < 40:
        deep = folder / str(i) / "a" / "b"
        cache_folder.write(deep / "kernel.cubin", folder, name.encode() * 1000)
        assert cache_folder.read(deep / "kernel.cubin", folder) in (b"one" * 1000, b"two" * 1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new cache folder after two processes that began together have run `ADDED` and `READ` with it."""
    folder, gate = tmp_path_factory.mktemp("two") / "cache", tmp_path_factory.mktemp("gate")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SFAST_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", START + ADDED + READ, str(folder), name, str(gate)] for name in ("one", "two")]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return folder


def test_what_both_add_is_kept(folder):
    kept = Measurements(lambda: folder).all()
    assert len(kept) == 40 <= KEPT
    for name in ("one", "two"):
        assert [each["rows"][0]["n"] for each in kept if each["host"] == name] == list(range(20))

    def names(count: int) -> list[str]:
        return sorted(f"{name} {i}" for name in ("one", "two") for i in range(count))

    assert sorted(json.loads((folder / "stages.json").read_text())) == [f"first {name}" for name in names(3)]
    assert sorted(json.loads((folder / "last_calls.json").read_text())) == names(6)
    assert sorted(json.loads((folder / "choices-x.json").read_text())["choices"]["attention"]) == names(20)


def test_what_one_reads_is_never_half_of_what_the_other_writes(folder):
    assert not [each for each in folder.rglob("*") if each.name.startswith(".") and each.name != ".turn"]


def test_a_process_that_keeps_the_folder_delays_others_only_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "WAIT_S", 0.3)
    holder = (
        "import sys, time; from pathlib import Path; from sfast_ext import cache_folder\n"
        "with cache_folder.turn(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        began = time.monotonic()
        with cache_folder.turn(tmp_path):
            assert 0.2 < time.monotonic() - began < 5
        process.kill()
    # one that ends in any way gives it back
    began = time.monotonic()
    with cache_folder.turn(tmp_path):
        assert time.monotonic() - began < 0.2


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="a folder that the user may not write to")
def test_a_folder_that_allows_no_turns_has_none(tmp_path):
    tmp_path.chmod(0o500)
    with cache_folder.turn(tmp_path / "below"):
        pass
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.name == "nt", reason="Windows tells no owner")
def test_a_folder_that_others_may_write_to_gets_no_file(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with cache_folder.turn(folder):
        assert not list(folder.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    target = tmp_path / "target"
    folder = tmp_path / "cache"
    cache_folder.make(folder, folder)
    (folder / ".turn").symlink_to(target)
    with cache_folder.turn(folder):
        assert not target.exists()
