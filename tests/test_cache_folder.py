"""Compiled code is taken only from folders and files that nobody but the user can have written to."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faulty import Pair, pretend_a_gpu

from sfast_ext import Config, cache_folder, environment
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.cuda_libraries import Bindings

if sys.platform != "win32":
    import grp
    import pwd

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows tells no owner")

ME = os.getuid() if os.name != "nt" else 0
ME_AND_GROUP = ("me", os.getgid() if os.name != "nt" else 0)
OTHERS = [0o720, 0o702, 0o777, 0o1777]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache folder under one where all may write, as in /tmp."""
    above = tmp_path / "tmp"
    above.mkdir()
    above.chmod(0o1777)
    folder = above / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files belong to another user, who is not root."""
    monkeypatch.setattr(os, "getuid", lambda: ME + 1)
    monkeypatch.setattr(cache_folder, "_ROOT", -1)


def test_what_root_put_there_is_taken(root, stranger, monkeypatch):
    monkeypatch.setattr(cache_folder, "_ROOT", ME)
    (root / "code").write_bytes(b"code")
    assert cache_folder.read(root / "code", root) == b"code"


@pytest.mark.parametrize("allowed", [0o700, 0o755, 0o750])
def test_what_is_the_users_alone_is_taken(root, allowed):
    root.chmod(allowed)
    (root / "code").write_bytes(b"code")
    assert cache_folder.refusal(root / "code", root) is None
    assert cache_folder.read(root / "code", root) == b"code"
    assert cache_folder.refusal(root / "other" / "code", root) is None


GROUPS = {
    "its own": (ME_AND_GROUP, []),
    "its own, with itself in it": (ME_AND_GROUP, ["me"]),
    "one with a member": (ME_AND_GROUP, ["another"]),
    "of another name": (("users", ME_AND_GROUP[1]), []),
    "not its first": (("me", ME_AND_GROUP[1] + 1), []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_users_own_group_may_write(name, root, monkeypatch):
    (group, first), members = GROUPS[name]
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me", pw_gid=first))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    root.chmod(0o770)
    reason = cache_folder.refusal(root, root)
    assert reason is None if name.startswith("its own") else "chmod" in reason
    root.chmod(0o772)
    assert "chmod" in cache_folder.refusal(root, root)


@pytest.fixture
def shared_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="users", gr_mem=[]))


@pytest.mark.usefixtures("shared_group")
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("which", ["", "inner", "inner/code"])
def test_where_others_may_write_is_refused(root, which, others):
    (root / "inner").mkdir(mode=0o700)
    file = root / "inner" / "code"
    file.write_bytes(b"code")
    (root / which).chmod(others)
    reason = cache_folder.refusal(file, root)
    assert f"chmod go-w {root / which})" in reason and "SFAST_CACHE_DIR" in reason and reason.isascii()
    with pytest.raises(PermissionError) as refused:
        cache_folder.read(file, root)
    assert str(refused.value) == reason
    (root / which).chmod(0o700)
    assert cache_folder.read(file, root) == b"code"


def test_a_folder_is_refused_whether_or_not_the_file_is_there(root):
    root.chmod(0o777)
    assert str(root) in cache_folder.refusal(root / "not" / "there", root)


def test_what_another_user_owns_is_refused(root, stranger):
    reason = cache_folder.refusal(root, root)
    assert f"{root} belongs to another user" in reason and "remove it" in reason
    with pytest.raises(PermissionError, match="another user"):
        cache_folder.make(root / "inner", root)
    assert not (root / "inner").exists()


def test_a_link_of_another_user_to_a_folder_of_ones_own_is_refused(root, monkeypatch):
    link, lstat = root.parent / "link", Path.lstat
    link.symlink_to(root)
    assert cache_folder.refusal(link, link) is None
    monkeypatch.setattr(Path, "lstat", lambda self: SimpleNamespace(st_uid=lstat(self).st_uid + (self == link)))
    assert "link belongs to another user" in cache_folder.refusal(link, link)


def test_what_is_read_is_what_was_looked_at(root, monkeypatch):
    """Another file may take the place of the first between a look by name and the opening."""
    (root / "code").write_bytes(b"code")
    (root / "code").chmod(0o666)
    monkeypatch.setattr(cache_folder, "refusal", lambda path, root: None)
    with pytest.raises(PermissionError, match="chmod"):
        cache_folder.read(root / "code", root)


def test_folders_are_made_for_the_user_alone(root):
    before = os.umask(0)
    try:
        cache_folder.make(root / "a" / "b", root / "a")
    finally:
        os.umask(before)
    assert mode(root / "a") == mode(root / "a" / "b") == 0o700
    cache_folder.make(root / "a" / "b", root / "a")


def test_nothing_is_made_if_others_may_write(root):
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod"):
        cache_folder.make(root / "inner", root)
    assert not list(root.iterdir())


def test_on_windows_nobody_looks(root, stranger, monkeypatch):
    root.chmod(0o777)
    (root / "code").write_bytes(b"code")
    (root / "code").chmod(0o666)
    monkeypatch.setattr(cache_folder, "_LOOKED_AT", False)
    cache_folder.make(root / "inner", root)
    assert cache_folder.refusal(root, root) is None and cache_folder.read(root / "code", root) == b"code"


def test_where_kernels_are_kept(monkeypatch):
    for name in ("SFAST_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert nvrtc.folder() == Path.home() / ".cache" / "sfast_ext"
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    assert nvrtc.folder() == Path("/a/sfast_ext")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/b")
    assert nvrtc.folder() == Path("/b/sfast_ext")
    monkeypatch.setenv("SFAST_CACHE_DIR", "/c")
    assert nvrtc.folder() == Path("/c")


@pytest.fixture
def kernel(root, monkeypatch):
    """A kernel in CUDA C++, of which a stand-in of NVRTC makes `code`; what that was asked for."""
    asked: list[str] = []

    def build(source, architecture, constants):
        asked.append(architecture)
        return b"code", ""

    monkeypatch.setenv("SFAST_CACHE_DIR", str(root / "kernels"))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(None, SimpleNamespace(version=lambda: (13, 0))))
    monkeypatch.setattr(nvrtc, "build", build)
    source = nvrtc.Source("flash_attention", lambda *args: None, ())
    return SimpleNamespace(source=source, asked=asked, folder=root / "kernels")


def test_compiled_kernels_are_kept_in_a_folder_for_the_user_alone(kernel):
    before = os.umask(0)
    try:
        kernel.source.compiled("sm_90a", {})
    finally:
        os.umask(before)
    (file,) = kernel.folder.iterdir()
    assert mode(kernel.folder) == 0o700 and not mode(file) & 0o077
    assert kernel.source.compiled("sm_90a", {}) == b"code" and len(kernel.asked) == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_windows_keeps_locked_stays_and_no_other_is_left_beside_it(kernel, monkeypatch, there):
    """Another process has it open: on Windows nothing takes its place then."""
    if there:
        kernel.source.compiled("sm_90a", {})
        next(kernel.folder.iterdir()).write_bytes(b"spoilt")

    def replace(source, target):
        assert Path(source).is_file() and Path(source).parent == kernel.folder
        raise PermissionError(13, "The process cannot access the file because it is being used by another process")

    monkeypatch.setattr(nvrtc.os, "replace", replace)
    assert kernel.source.compiled("sm_90a", {}) == b"code"
    assert len(list(kernel.folder.iterdir())) == there and kernel.source.kept == there


def test_a_full_disk_leaves_nothing_behind(kernel, monkeypatch):
    honest = os.fdopen

    @contextlib.contextmanager
    def full(handle, how):
        def write(content):
            raise OSError(28, "No space left on device")

        with honest(handle, how):
            yield SimpleNamespace(write=write)

    monkeypatch.setattr(cache_folder.os, "fdopen", full)
    assert kernel.source.compiled("sm_90a", {}) == b"code"
    assert list(kernel.folder.iterdir()) == [] and not kernel.source.kept


@pytest.mark.parametrize("name", ["Jörg Müller", "画像 AI", "x" * 120])
def test_names_of_users_that_are_not_plain(kernel, monkeypatch, root, name):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(root / name / "sfast_ext"))
    for _ in range(2):
        assert kernel.source.compiled("sm_86", {}) == b"code"
    assert len(kernel.asked) == 1
    (file,) = (root / name / "sfast_ext").iterdir()
    # with the longest name of a kernel and of a user, Windows still opens it: 259 characters, C: and the dots aside
    assert len(str(Path("C:/Users") / ("x" * 64) / ".cache" / "sfast_ext" / file.name)) < 200


def test_nvrtc_is_given_no_path(kernel, monkeypatch):
    """On Windows it opens none with other letters than ASCII: sources and headers are handed over as text."""
    given = []

    def compiled(source, headers, options):
        given.extend([*headers, *options])
        return b"code", ""

    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "loaded_nvrtc", lambda: SimpleNamespace(compile=compiled))
    nvrtc.build(b"source", "sm_86", {"CHANNELS": 320})
    texts = [each if isinstance(each, str) else each.decode() for each in given]
    assert "-DCHANNELS=320" in texts
    assert not any("/" in text or "\\" in text or text.startswith(("-I", "--include")) for text in texts)


def test_a_kernel_that_others_may_have_written_is_compiled_anew(kernel):
    kernel.source.compiled("sm_90a", {})
    (file,) = kernel.folder.iterdir()
    file.chmod(0o666)
    assert kernel.source.compiled("sm_90a", {}) == b"code" and len(kernel.asked) == 2
    # its folder is the user's: the one that was made takes its place
    assert mode(file) == 0o600 and kernel.source.kept


@pytest.mark.parametrize("whose", ["others write", "another's"])
def test_kernels_are_compiled_in_memory_if_their_folder_is_refused(kernel, whose, request):
    kernel.source.compiled("sm_90a", {})
    (file,) = kernel.folder.iterdir()
    file.unlink()
    if whose == "another's":
        request.getfixturevalue("stranger")
    else:
        kernel.folder.chmod(0o777)
    for times in (2, 3):
        assert kernel.source.compiled("sm_90a", {}) == b"code" and len(kernel.asked) == times
    assert not kernel.source.kept and not list(kernel.folder.iterdir())


@torch.no_grad()
def test_the_report_says_why_once_and_plans_are_made(kernel, monkeypatch):
    kernel.folder.mkdir()
    kernel.folder.chmod(0o702)
    pretend_a_gpu(monkeypatch)
    pair = Pair(config=Config(allow_cpu=True, triton=False))
    pair.same(2)
    pair.same(2, batch=3)
    assert pair.counter("captures") == 2 and pair.runs == 2, pair.words()
    said = [event["message"] for event in pair.acc.report.as_dict()["events"] if event["stage"] == "kernels"]
    assert len(said) == 1 and str(kernel.folder) in said[0]
    assert said[0].endswith(".") and "chmod" in said[0]
    pair.release()


def test_what_does_not_work_here_names_the_folder(root, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    monkeypatch.delenv("SFAST_CACHE_DIR", raising=False)
    nvrtc.folder().mkdir()
    nvrtc.folder().chmod(0o777)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert sum(str(nvrtc.folder()) in sentence for sentence in environment.known_bad()) == 1


def test_without_a_home_nothing_is_said(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TORCH_EXTENSIONS_DIR", "SFAST_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert environment.left_out(torch.device("cuda", 0)) == []
