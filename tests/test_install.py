from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def install():
    spec = importlib.util.spec_from_file_location("stable_fast_install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(monkeypatch, install, **versions):
    monkeypatch.setattr(install, "installed", lambda *names: next((versions[n] for n in names if n in versions), None))


def test_it_ends_well_and_does_nothing_that_takes_long():
    """It starts no process, opens no connection and imports nothing heavy."""
    code = (
        "import runpy, sys; seen = set();"
        "sys.addaudithook(lambda event, args: seen.add(event));"
        "runpy.run_path('install.py', run_name='__main__');"
        "slow = {each for each in seen if each.split('.')[0] in ('subprocess', 'socket')};"
        "slow |= seen & {'os.system', 'os.exec', 'os.fork', 'os.posix_spawn', 'os.spawn', 'time.sleep'};"
        "assert 'open' in seen and not slow, slow;"
        "heavy = {'torch', 'numpy', 'gradio', 'triton'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("triton", ["triton", "triton-windows"])
def test_silent_if_nothing_is_missing(monkeypatch, install, triton):
    packages(monkeypatch, install, torch="2.1.2+cu121", **{triton: "3.0"})
    assert install.remarks() == []


def test_silent_on_a_cpu_build_and_without_torch(monkeypatch, install):
    packages(monkeypatch, install, torch="2.13.0+cpu")
    assert install.remarks() == []
    packages(monkeypatch, install)
    assert install.remarks() == []


def test_names_an_old_torch(monkeypatch, install):
    packages(monkeypatch, install, torch="2.0.1+cu118", triton="2.0")
    assert len(install.remarks()) == 1 and "2.0.1" in install.remarks()[0]
    packages(monkeypatch, install, torch="2.13.0+cu132", triton="3.7")
    assert install.remarks() == []


WINDOWS = {
    "2.0.1+cu118": None, "2.1.2+cu121": None, "2.3.1+cu121": None, "2.4.1+cu121": "<3.2", "2.5.1+cu124": "<3.2",
    "2.6.0+cu124": "<3.3", "2.7.1+cu128": "<3.4", "2.10.0+cu130": "<3.7", "2.13.0+cu132": "",
}  # fmt: skip


@pytest.mark.parametrize("torch", WINDOWS)
def test_names_the_triton_that_goes_with_the_torch_of_a_windows(monkeypatch, install, torch):
    packages(monkeypatch, install, torch=torch)
    monkeypatch.setattr(install.sys, "platform", "win32")
    monkeypatch.setattr(install.sys, "executable", "C:\\Users\\Jörg Müller\\画像\\python.exe")
    told = [remark for remark in install.remarks() if "Triton" in remark]
    # for those that are older than 2.4 there is none, and nothing to be done
    assert len(told) == (WINDOWS[torch] is not None)
    assert all(
        f'"C:\\Users\\Jörg Müller\\画像\\python.exe" -m pip install "triton-windows{WINDOWS[torch]}"' in t for t in told
    )


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_code_page_that_lacks_a_letter_of_the_path_ends_nothing(encoding, tmp_path):
    """The WebUI reads what it prints through a pipe, for which Python has the code page of the user's Windows."""
    code = (
        "import runpy, sys; sys.executable = 'C:/画像/python.exe'; sys.platform = 'win32';"
        "import importlib.metadata as m; m.version = lambda name: {'torch': '2.7.1+cu128'}[name] if name == 'torch'"
        " else (_ for _ in ()).throw(m.PackageNotFoundError(name));"
        "runpy.run_path('install.py', run_name='__main__')"
    )
    environment = {"PYTHONIOENCODING": encoding, "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=environment, timeout=300)
    assert result.returncode == 0 and not result.stderr
    # both WebUIs decode it as UTF-8
    told = result.stdout.decode("utf-8")
    assert told.startswith("Stable Fast: Triton is not installed") and '"C:/画像/python.exe" -m pip install' in told


def test_names_the_package_of_this_system_for_a_missing_triton(monkeypatch, install):
    packages(monkeypatch, install, torch="2.7.0+cu128")
    monkeypatch.setattr(install.sys, "platform", "linux")
    assert 'install "triton"' in install.remarks()[0]
    monkeypatch.setattr(install.sys, "platform", "darwin")
    assert install.remarks() == []
