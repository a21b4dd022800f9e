"""NVRTC is found in folders as they are on users' machines; a broken one is said, and the next one is tried."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from sfast_ext import environment
from sfast_ext.kernels.backend import cuda_libraries

WHEELS = {
    # NVIDIA's packages, as they are on PyPI
    "Linux, CUDA 12.1": ("12.1", "nvidia/cuda_nvrtc/lib", "libnvrtc-builtins.so.12.1 libnvrtc.so.12", "libnvrtc.so.12"),
    "Linux, CUDA 12.8": (
        "12.8",
        "nvidia/cuda_nvrtc/lib",
        "libnvrtc-builtins.alt.so.12.8 libnvrtc-builtins.so.12.8 libnvrtc.alt.so.12 libnvrtc.so.12",
        "libnvrtc.so.12",
    ),
    "Linux, CUDA 13.0": (
        "13.0",
        "nvidia/cu13/lib",
        "libnvrtc-builtins.alt.so.13.0 libnvrtc-builtins.so.13.0 libnvrtc.alt.so.13 libnvrtc.so.13",
        "libnvrtc.so.13",
    ),
    "Windows, CUDA 12.1": (
        "12.1",
        "nvidia/cuda_nvrtc/bin",
        "nvrtc-builtins64_121.dll nvrtc64_120_0.dll",
        "nvrtc64_120_0.dll",
    ),
    "Windows, CUDA 12.8": (
        "12.8",
        "nvidia/cuda_nvrtc/bin",
        "nvrtc-builtins64_128.dll nvrtc64_120_0.alt.dll nvrtc64_120_0.dll",
        "nvrtc64_120_0.dll",
    ),
    "Windows, CUDA 13.0": (
        "13.0",
        "nvidia/cu13/bin/x86_64",
        "nvrtc-builtins64_130.dll nvrtc64_130_0.alt.dll nvrtc64_130_0.dll",
        "nvrtc64_130_0.dll",
    ),
    # torch's own folder: in its wheels for Windows, and in those for Linux before NVIDIA's packages
    "Windows, in torch": (
        "12.1",
        "torch/lib",
        "caffe2_nvrtc.dll nvrtc-builtins64_121.dll nvrtc64_120_0.dll torch_cuda.dll",
        "nvrtc64_120_0.dll",
    ),
    "Linux, in torch": (
        "11.7",
        "torch/lib",
        "libcaffe2_nvrtc.so libnvrtc-builtins-2dc4bf68.so.11.7 libnvrtc-672ee683.so.11.2 libtorch_cuda.so",
        "libnvrtc-672ee683.so.11.2",
    ),
}

WINDOWS = {
    # torch/lib of the wheels for Windows, as programs that were packed with them list it: libtorch for CUDA 12.1 (torch
    # 2.1 to 2.3), a torch for CUDA 12.4, the whole folder of a torch for CUDA 12.8
    "12.1": (
        "asmjit.dll c10.dll c10_cuda.dll caffe2_nvrtc.dll cublas64_12.dll cublasLt64_12.dll cudart64_12.dll"
        " cudnn64_8.dll cudnn_adv_infer64_8.dll cudnn_adv_train64_8.dll cudnn_cnn_infer64_8.dll"
        " cudnn_cnn_train64_8.dll cudnn_ops_infer64_8.dll cudnn_ops_train64_8.dll cufft64_11.dll cufftw64_11.dll"
        " cupti64_2023.1.1.dll curand64_10.dll cusolver64_11.dll cusolverMg64_11.dll cusparse64_12.dll fbgemm.dll"
        " libiomp5md.dll libiompstubs5md.dll nvJitLink_120_0.dll nvToolsExt64_1.dll nvrtc-builtins64_121.dll"
        " nvrtc64_120_0.dll torch.dll torch_cpu.dll torch_cuda.dll torch_global_deps.dll uv.dll zlibwapi.dll"
    ),
    "12.4": (
        "cublas64_12.dll cublasLt64_12.dll cudnn64_9.dll cudnn_adv64_9.dll cudnn_cnn64_9.dll"
        " cudnn_engines_precompiled64_9.dll cudnn_engines_runtime_compiled64_9.dll cudnn_graph64_9.dll"
        " cudnn_heuristic64_9.dll cudnn_ops64_9.dll cufft64_11.dll curand64_10.dll cusparse64_12.dll"
        " nvJitLink_120_0.dll nvrtc-builtins64_124.dll nvrtc64_120_0.dll"
    ),
    "12.8": (
        "c10.dll c10_cuda.dll caffe2_nvrtc.dll cublas64_12.dll cublasLt64_12.dll cudart64_12.dll cudnn64_9.dll"
        " cudnn_adv64_9.dll cudnn_cnn64_9.dll cudnn_engines_precompiled64_9.dll cudnn_engines_runtime_compiled64_9.dll"
        " cudnn_graph64_9.dll cudnn_heuristic64_9.dll cudnn_ops64_9.dll cufft64_11.dll cufftw64_11.dll"
        " cupti64_2025.1.1.dll curand64_10.dll cusolver64_11.dll cusolverMg64_11.dll cusparse64_12.dll libiomp5md.dll"
        " nvJitLink_120_0.dll nvperf_host.dll nvrtc-builtins64_128.dll nvrtc64_120_0.alt.dll nvrtc64_120_0.dll shm.dll"
        " torch_cpu.dll torch_cuda.dll torch_python.dll uv.dll"
    ),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages that torch is said to be in."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(cuda_libraries.sys, "path", [str(tmp_path), str(tmp_path / "not there")])
    monkeypatch.setattr(cuda_libraries.sys, "prefix", str(tmp_path / "prefix"))
    return tmp_path


def put(site: Path, folder: str, names: str) -> list[Path]:
    (site / folder).mkdir(parents=True, exist_ok=True)
    files = [site / folder / name for name in names.split()]
    for file in files:
        file.write_bytes(b"no library")
    return files


def found() -> list[str]:
    return [file.name for file in cuda_libraries.candidates(cuda_libraries.folders())]


@pytest.mark.parametrize("wheel", WHEELS)
def test_it_is_found_where_wheels_bring_it(site, monkeypatch, wheel):
    built, folder, names, wanted = WHEELS[wheel]
    monkeypatch.setattr(torch.version, "cuda", built)
    put(site, folder, names)
    assert found() == [wanted]


@pytest.mark.parametrize("built", WINDOWS)
@pytest.mark.parametrize("above", ["plain", "of Jörg Müller/AI 画像", "d" * 200])
def test_in_torchs_folder_on_windows_built_ins_come_first_and_nothing_else_is_loaded(
    tmp_path, monkeypatch, built, above
):
    """Wherever the WebUI was unpacked."""
    site = tmp_path / above / "venv" / "Lib" / "site-packages"
    monkeypatch.setattr(torch, "__file__", str(site / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(cuda_libraries.sys, "path", [str(site)])
    monkeypatch.setattr(cuda_libraries.sys, "prefix", str(tmp_path / above / "venv"))
    put(site, "torch/lib", WINDOWS[built])
    loader = Loader()
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", loader)
    cuda_libraries.nvrtc.cache_clear()
    try:
        # by its whole path: the loader then looks for what it needs in its folder
        assert cuda_libraries.nvrtc() == str(site / "torch" / "lib" / "nvrtc64_120_0.dll")
    finally:
        cuda_libraries.nvrtc.cache_clear()
    builtins = f"nvrtc-builtins64_{built.replace('.', '')}.dll"
    assert [name for name, _ in loader.loaded] == [builtins, "nvrtc64_120_0.dll"]
    assert environment.nvrtc_file() == "lib/nvrtc64_120_0.dll"


@pytest.mark.parametrize("folder", ["Library/bin", "Library/bin/x64", "bin"])
def test_a_conda_for_windows_has_it_in_its_own_folder(site, monkeypatch, folder):
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    put(site / "prefix", folder, "nvrtc-builtins64_124.dll nvrtc64_120_0.dll")
    assert found() == ["nvrtc64_120_0.dll"]


def test_that_of_torchs_cuda_goes_before_and_others_are_left_out(site, monkeypatch):
    put(site, "torch/lib", "libnvrtc.so")
    put(site, "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12")
    put(site, "nvidia/cu13/lib", "libnvrtc.so.13")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found() == ["libnvrtc.so.13", "libnvrtc.so"]
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert found() == ["libnvrtc.so.12", "libnvrtc.so"]
    # a torch for CPUs runs nothing: the newest compiles for most cards
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found() == ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


class Loader:
    """Stands in for ctypes.CDLL: notes what is loaded, and refuses some."""

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.refused, self.loaded = refused, []

    def __call__(self, name: str, mode: int = ctypes.DEFAULT_MODE) -> str:
        if Path(name).name in self.refused:
            raise OSError("cannot open shared object file")
        self.loaded.append((Path(name).name, mode == ctypes.RTLD_GLOBAL))
        return name


@pytest.fixture
def load(site, monkeypatch):
    def load(*refused: str) -> Loader:
        loader = Loader(refused)
        monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", loader)
        cuda_libraries.nvrtc.cache_clear()
        return loader

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    yield load
    cuda_libraries.nvrtc.cache_clear()


def test_built_ins_are_loaded_first_for_all_to_find(site, load):
    _, folder, names, _ = WHEELS["Linux, CUDA 12.8"]
    put(site, folder, names)
    loader = load()
    assert Path(cuda_libraries.nvrtc()).name == "libnvrtc.so.12"
    # Windows has one mode for all
    assert loader.loaded == [("libnvrtc-builtins.so.12.8", True), ("libnvrtc.so.12", os.name == "nt")]


def test_built_ins_that_do_not_load_are_left_to_nvrtc(site, load):
    put(site, "torch/lib", "libnvrtc.so.12 libnvrtc-builtins.so.12.8")
    loader = load("libnvrtc-builtins.so.12.8")
    assert Path(cuda_libraries.nvrtc()).name == "libnvrtc.so.12" and len(loader.loaded) == 1


def test_one_that_does_not_load_gives_way_to_the_next(site, load):
    put(site, "torch/lib", "libnvrtc.so.12")
    put(site, "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12.8")
    load("libnvrtc.so.12")
    assert Path(cuda_libraries.nvrtc()).name == "libnvrtc.so.12.8"
    load("libnvrtc.so.12", "libnvrtc.so.12.8")
    with pytest.raises(cuda_libraries.NotFound, match="libnvrtc.so.12 does not load .*; libnvrtc.so.12.8 does not"):
        cuda_libraries.nvrtc()


def test_where_there_is_none_the_reason_is_told(site, load, monkeypatch):
    load()
    for cached in (cuda_libraries.no_nvrtc, cuda_libraries.bindings):
        cached.cache_clear()
    try:
        assert cuda_libraries.no_nvrtc() == "NVRTC was not found next to torch"
        assert cuda_libraries.bindings().nvrtc is None
    finally:
        for cached in (cuda_libraries.no_nvrtc, cuda_libraries.bindings, cuda_libraries.driver):
            cached.cache_clear()


def test_a_folder_that_cannot_be_read_is_passed_over(site, monkeypatch):
    (file,) = put(site, "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12")
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    places = [site / "not there", file, file.parent]
    assert cuda_libraries.candidates(places) == [file]
