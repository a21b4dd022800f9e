"""Stand-ins of libraries that are installed as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import HOMES, hidden, takes_its_place

INSTALLED = '''
import torch
library = torch.library.Library("xformers_flash", "DEF")
library.define("flash_fwd(Tensor query) -> Tensor")
'''
SOAK = ["--play", "small:3", "xformers_switched:1", "calm:2", "xformers_switched:3"]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a library that registers an operator of the stand-in of xformers."""
    of_ops, told = tmp_path / "xformers" / "ops", tmp_path / "xformers-0.0.35.dist-info"
    of_ops.mkdir(parents=True)
    told.mkdir()
    (of_ops.parent / "__init__.py").touch()
    (of_ops / "__init__.py").write_text(INSTALLED)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.35\n")
    return tmp_path


@pytest.mark.long
def test_random_events_next_to_an_installed_library(installed):
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", *SOAK], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"faults": []' in done.stdout


def test_an_installed_library_is_not_imported_again(installed, monkeypatch):
    name = "xformers"
    monkeypatch.setattr("foreign._loaded", {})
    for key in [k for k in sys.modules if k.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, key)
    assert takes_its_place("sageattention")
    monkeypatch.syspath_prepend(installed)
    assert not takes_its_place(name)
    with hidden(name):
        assert takes_its_place(name)
    assert not takes_its_place(name)
    assert name not in sys.modules and str(HOMES[name]) not in sys.path
