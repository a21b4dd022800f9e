"""Compiles kernels for any card, without one, by the Triton that is imported.

Since 2.1 the way to describe a kernel to the compiler has changed with nearly every version; `compiled` knows them all.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sfast_ext.kernels.backend import triton_runtime

SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""By compute capability, the most bytes of shared memory that a block may ask for."""
# the capabilities that a version of Triton brings, beside those of the versions before it
_BROUGHT: dict[tuple[int, int], tuple[int, ...]] = {(2, 1): (75, 80, 86, 89, 90), (3, 3): (100, 120)}
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")
_OWN = ("launch_pdl", "enable_fp_fusion")  # of these each Triton tells for itself
_PDL_SINCE = 90  # least capability with programmatic dependent launch


class Compiled(NamedTuple):
    """What the compiler made: assembler text, and the bytes of shared memory that a block asks for."""

    ptx: str
    shared: int


def version() -> tuple[int, int]:
    """Of the Triton that is imported, major and minor."""
    major, minor = triton_runtime.triton.__version__.split(".")[:2]
    return int(major), int(minor)


def capabilities(of: tuple[int, int]) -> tuple[int, ...]:
    """The compute capabilities that a version of Triton compiles for."""
    return tuple(each for since, brought in _BROUGHT.items() if of >= since for each in brought)


def compiles_mma(of: tuple[int, int], capability: int) -> bool:
    """Whether a version of Triton compiles every `tl.dot` for a card: for Turing since 3.4."""
    return capability >= 80 or of >= (3, 4)


def pdl_enabled(capability: int) -> bool:
    """Whether this Triton compiles kernels with programmatic dependent launch for a compute capability."""
    return triton_runtime.HAS_PDL and capability >= _PDL_SINCE


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    divisible: Collection[str] = (),
) -> Compiled:
    """Compile a kernel down to machine code.

    Args:
        kernel: a function under `triton.jit`.
        types: of its arguments by name, as Triton writes them ("*fp16", "i32"), but of those in `constants`.
        constants: of its arguments by name, and options of the launch. PDL and what goes with it need not be there.
            An argument that is no constexpr may be here with the value 1: Triton compiles that as a constant.
        capability: of the card, such as 89.
        divisible: the arguments that are multiples of 16.

    Raises:
        Exception: whatever the compiler raises, and AssertionError where it made nothing.
    """
    values = {name: value for name, value in constants.items() if name not in _OPTIONS}
    options = {name: value for name, value in constants.items() if name in _OPTIONS and name not in _OWN}
    if "PDL" in kernel.arg_names:
        values["PDL"] = pdl_enabled(capability)
        options |= triton_runtime.FP_FUSION | ({"launch_pdl": True} if values["PDL"] else {})
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    told = {name: types[name] for name in kernel.arg_names if name not in values}
    # in the order of the arguments: Triton's cache is keyed by it
    aligned = [name for name in told if name in divisible]
    compile_it = _generation(version())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # no launch leaves to Triton what it will do otherwise in 3.10
        warnings.filterwarnings("error", message=".*DEFAULT_FP_FUSION")
        made = compile_it(kernel, places, told, values, aligned, capability, options)
    assert made.ptx.strip(), "the compiler made no PTX"
    return made


_Compile = Callable[
    [Any, dict[str, int], dict[str, str], dict[str, Any], list[str], int, dict[str, Any]],
    Compiled,
]


def _generation(of: tuple[int, int]) -> _Compile:
    if of < (2, 3):
        return _by_arguments
    if of < (2, 4):
        return _by_source_of_2_3
    if of < (3, 2):
        return _by_places
    return _by_names if of < (3, 3) else _by_paths


def _compiler() -> Any:
    return importlib.import_module("triton.compiler.compiler")


def _target(capability: int) -> Any:
    return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)


def _ones(kernel: Any, places: dict[str, int], values: dict[str, Any]) -> set[int]:
    """The places of constants that are no constexpr: arguments known to be 1."""
    return {places[name] for name in values if places[name] not in kernel.constexprs}


def _by_arguments(kernel, places, types, values, aligned, capability, options):  # type: ignore[no-untyped-def]
    """Triton 2.1 and 2.2."""
    compiler = _compiler()
    descriptor, divisible = compiler.instance_descriptor, {places[name] for name in aligned}
    described = (divisible, _ones(kernel, places, values))
    newer = {} if version() < (2, 2) else {"num_ctas": 1, "enable_warp_specialization": False}
    made: list[Any] = []
    # what starts a kernel is built against CUDA's driver, and loaded: neither is needed
    with (
        mock.patch.object(compiler, "make_stub", lambda *args, **kwargs: ""),
        mock.patch.object(compiler, "CompiledKernel", lambda *args: made.extend(args)),
    ):
        compiler.compile(
            kernel,
            signature={places[name]: kind for name, kind in types.items()},
            constants={places[name]: value for name, value in values.items()},
            configs=[descriptor(*described) if not newer else descriptor(*described, set(), set())],
            num_warps=options.get("num_warps", 4),
            num_stages=options.get("num_stages", 3),
            cc=capability,
            device=0,
            device_type="cuda",
            debug=False,
            **newer,
        )
    _, _, metadata, asm = made
    return Compiled(asm["ptx"], metadata["shared"])


def _described_by_places(kernel, places, types, values, aligned):  # type: ignore[no-untyped-def]
    compiler = _compiler()
    divisible = {places[name] for name in aligned}
    attributes = compiler.AttrsDescriptor(divisible_by_16=divisible, equal_to_1=_ones(kernel, places, values))
    signature = {places[name]: kind for name, kind in types.items()}
    return compiler.ASTSource(kernel, signature, {places[name]: value for name, value in values.items()}, attributes)


def _by_source_of_2_3(kernel, places, types, values, aligned, capability, options):  # type: ignore[no-untyped-def]
    compiler = _compiler()
    backend = importlib.import_module("triton.compiler.backends.cuda").CUDABackend
    source, made = _described_by_places(kernel, places, types, values, aligned), []
    with (
        mock.patch.object(backend, "make_launcher_stub", lambda *args, **kwargs: ""),
        mock.patch.object(compiler, "CompiledKernel", lambda *args: made.extend(args)),
    ):
        compiler.compile(source, target=("cuda", capability), options=options)
    metadata = Path(made[1])
    return Compiled(
        metadata.with_suffix(".ptx").read_text(encoding="utf-8"),
        json.loads(metadata.read_text(encoding="utf-8"))["shared"],
    )


def _made(source: Any, capability: int, options: dict[str, Any]) -> Compiled:
    made = _compiler().compile(source, target=_target(capability), options=options)
    return Compiled(made.asm["ptx"], made.metadata.shared)


def _by_places(kernel, places, types, values, aligned, capability, options):  # type: ignore[no-untyped-def]
    """Triton 3.0 and 3.1."""
    return _made(_described_by_places(kernel, places, types, values, aligned), capability, options)


def _by_names(kernel, places, types, values, aligned, capability, options):  # type: ignore[no-untyped-def]
    """Triton 3.2."""
    descriptor = importlib.import_module("triton.backends.compiler").AttrsDescriptor
    attributes = descriptor.from_hints({places[name]: 16 for name in aligned})
    return _made(_compiler().ASTSource(kernel, types, values, attributes), capability, options)


def _by_paths(kernel, places, types, values, aligned, capability, options):  # type: ignore[no-untyped-def]
    """Triton 3.3 and later."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(places[name],): value for name, value in values.items()}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    return _made(_compiler().ASTSource(kernel, signature, constants, attributes), capability, options)
