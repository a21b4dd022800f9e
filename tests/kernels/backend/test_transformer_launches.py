"""The kernels for diffusion transformers are compiled ahead of time: dry runs find what is launched."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.compile_table import cuda, launches
from benchmarks.kernels import transformers
from sfast_ext import kernels
from sfast_ext.kernels.backend import size_prediction

from .transformer_cases import transformer_cases

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="they are in CUDA C++, the interpreter is Triton's")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dry_runs_find_each_launch(dtype: torch.dtype) -> None:
    calls = launches.of_transformers(dtype)
    with cuda.for_any_card(), launches._card(80):
        found = list(size_prediction.launched(calls, launches._GPU).values())
    names = Counter(launch.kernel.name for launch in found)
    # images of other sizes, and of other batches, ask for nothing else
    assert names["swiglu"] == 1 and names["norm_rotary"] == 2 * len(transformers.HEADS) + 1
    assert names["modulated_norm"] == 14 * len(transformers.ROWS) and names["activation8"] == 7
    known = [given for _, given in transformer_cases()]
    packs = {launch.constants["PACK"] for launch in found}
    assert packs == {8} and all(launch.constants["PACK"] == 8 for launch in found)
    if dtype == torch.bfloat16:
        assert sum(launch.constants in known for launch in found) > 15


