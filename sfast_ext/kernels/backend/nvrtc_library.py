"""NVRTC, NVIDIA's compiler of CUDA C++ at run time, by ctypes (https://docs.nvidia.com/cuda/nvrtc/)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from sfast_ext.kernels.backend.cuda_driver import Unavailable

_HANDLE, _NUMBER = ctypes.POINTER(c_void_p), ctypes.POINTER(c_int)
_SIZE, _TEXTS = ctypes.POINTER(c_size_t), ctypes.POINTER(c_char_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (_NUMBER, _NUMBER),
    "nvrtcGetNumSupportedArchs": (_NUMBER,),
    "nvrtcGetSupportedArchs": (_NUMBER,),
    "nvrtcCreateProgram": (_HANDLE, c_char_p, c_char_p, c_int, _TEXTS, _TEXTS),
    "nvrtcCompileProgram": (c_void_p, c_int, _TEXTS),
    "nvrtcGetProgramLogSize": (c_void_p, _SIZE),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, _SIZE),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (_HANDLE,),
}


class Nvrtc:
    """NVRTC in a loaded library.

    Raises:
        AttributeError: the library lacks a function. CUDA 11.2 and later have all.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = c_char_p
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments

    def version(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        """The compute capabilities that it compiles for, times ten."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        found = (c_int * max(count.value, 1))()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)[: count.value]

    def compile(self, source: bytes, headers: Mapping[bytes, bytes], options: Sequence[str]) -> tuple[bytes, str]:
        """Compile CUDA C++ to machine code.

        Args:
            headers: texts of headers by the names that the source includes them by. No file is read.
            options: as on NVCC's command line. The architecture is a real one ("sm_86"): a driver that is older than
                NVRTC refuses its PTX, but not its machine code.

        Returns:
            The cubin, and the compiler's log.

        Raises:
            Unavailable: it does not compile; the message is the log.
        """
        program, count = c_void_p(), len(headers)
        texts, names = (c_char_p * max(count, 1))(*headers.values()), (c_char_p * max(count, 1))(*headers)
        self._call("nvrtcCreateProgram", byref(program), source, b"kernel.cu", count, texts, names)
        try:
            given = (c_char_p * max(len(options), 1))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._read("nvrtcGetProgramLog", program).decode(errors="replace").strip("\0 \n")
            if code:
                raise Unavailable(log or self._error(code))
            return self._read("nvrtcGetCUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _read(self, name: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, byref(size))
        into = ctypes.create_string_buffer(max(size.value, 1))
        self._call(name, program, into)
        return into.raw[: size.value]

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        code = function(*arguments)
        if code:
            raise Unavailable(f"{name}: {self._error(code)}")

    def _error(self, code: int) -> str:
        return (self._library.nvrtcGetErrorString(code) or b"NVRTC error %d" % code).decode(errors="replace")
