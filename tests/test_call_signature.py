from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import NotOurs, flatten_call, flatten_output, rebuild_call, rebuild_output
from sfast_ext.runtime.verify import relative_error

CPU = torch.device("cpu")


@dataclasses.dataclass
class Residuals:
    down: tuple
    middle: torch.Tensor | None = None


Pair = namedtuple("Pair", "left right")


def test_a_call_survives_flattening_whatever_it_is_nested_in():
    x = torch.randn(2, 3)
    args = (x, [torch.ones(1), (None, "text")], Pair(torch.zeros(2), 3))
    kwargs = {"control": Residuals((x + 1, x + 2)), "added": OrderedDict(ids=x * 2), "flag": True}
    call = flatten_call(args, kwargs, CPU)
    back_args, back_kwargs = rebuild_call(call.tree, call.leaves)
    assert back_args[0] is x
    assert back_args[1][1] == (None, "text")
    assert isinstance(back_args[2], Pair) and back_args[2].right == 3
    assert torch.equal(back_kwargs["control"].down[1], x + 2) and back_kwargs["control"].middle is None
    assert isinstance(back_kwargs["added"], OrderedDict) and torch.equal(back_kwargs["added"]["ids"], x * 2)
    assert back_kwargs["flag"] is True


def signature(*args, static_numbers=False, **kwargs):
    return flatten_call(args, kwargs, CPU, static_numbers=static_numbers).signature


def test_a_number_of_its_own_is_an_input_and_not_part_of_the_signature():
    assert signature(torch.zeros(1), 981) == signature(torch.zeros(1), 1)
    assert signature(torch.zeros(1), scale=0.5) == signature(torch.zeros(1), scale=0.7)
    assert signature(981) != signature(981.0)
    assert signature(981, static_numbers=True) != signature(1, static_numbers=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 5)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
        (True, 1),
        (False, None),
        ({"scale": 0.5}, {"scale": 0.6}),
        ([1], (1,)),
        ("a", "b"),
    ],
)
def test_what_makes_signatures_differ(one, other):
    assert signature(one) != signature(other)


def test_the_names_of_arguments_make_signatures_differ():
    x = torch.zeros(2)
    assert signature(a=x) != signature(b=x) != signature(x)


def test_values_of_tensors_and_their_strides_do_not_make_signatures_differ():
    assert signature(torch.zeros(4, 4)) == signature(torch.ones(4, 4).t())


def test_autocast_is_part_of_the_signature():
    plain = signature(torch.zeros(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert signature(torch.zeros(1)) != plain


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.mark.parametrize(
    ("home", "name"),
    [
        (MATMUL, "allow_tf32"),
        (CUDNN, "allow_tf32"),
        (MATMUL, "allow_fp16_reduced_precision_reduction"),
        (MATMUL, "allow_bf16_reduced_precision_reduction"),
        (MATMUL, "allow_fp16_accumulation"),
        (CUDNN, "enabled"),
        (CUDNN, "deterministic"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_numerical_flags_are_part_of_the_signature(home, name):
    try:
        before = getattr(home, name)
    except (AttributeError, AssertionError):
        pytest.skip("this torch has no such flag")
    plain = signature(torch.zeros(1))
    try:
        setattr(home, name, not before)
        assert signature(torch.zeros(1)) != plain
    finally:
        setattr(home, name, before)
    assert signature(torch.zeros(1)) == plain


def test_flags_can_be_read_after_the_newer_setters_of_torch():
    """In a process of its own: the older getters raise from then on."""
    code = """
import torch
from sfast_ext.call_signature import numerical_flags
before = numerical_flags()
torch.use_deterministic_algorithms(True)
assert numerical_flags() != before
torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("high")
assert numerical_flags() != before
torch.set_float32_matmul_precision("highest")
assert numerical_flags() == before
if hasattr(torch._C, "_get_fp32_precision_getter"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert numerical_flags() != before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
def test_a_cuda_graph_does_not_outlive_tf32():
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 512, device="cuda")
    x = torch.randn(64, 512, device="cuda")
    exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    acc, before = accelerate(linear, Config(drop_slower=False)), MATMUL.allow_tf32
    try:
        for allowed in (True, False, True):
            MATMUL.allow_tf32 = allowed
            with torch.no_grad():
                for _ in range(3):
                    result = linear(x)
            assert (relative_error([result.double()], [exact]) > 1e-5) == allowed
    finally:
        MATMUL.allow_tf32 = before
    assert acc.report.counter("replays") > 3 and len(acc.plans) == 2, acc.report.as_dict()
    acc.release()


def test_leaves_become_contiguous_tensors_on_the_device():
    call = flatten_call((torch.arange(6.0).view(2, 3).t(), 7, 0.1), {}, CPU)
    x, n, f = call.tensors(CPU)
    assert x.is_contiguous() and x.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert n.dtype == torch.int64 and n.shape == () and n.item() == 7
    assert f.dtype == torch.float64 and f.item() == 0.1


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (object(), "object"),
        ({(1, 2): 3}, "keys"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_is_not_understood_is_not_ours(argument, words):
    with pytest.raises(NotOurs, match=words):
        flatten_call((argument,), {}, CPU)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"added": [1, (object(),)]}, "argument 0['added'][1][0] is a builtins.object"),
        (Residuals((torch.zeros(1), torch.zeros(1, device="meta"))), "argument 0.down[1] is on the meta device"),
        ({"{}": object()}, "argument 0['{}'] is a"),
    ],
)
def test_a_refusal_names_the_place(argument, words):
    with pytest.raises(NotOurs, match=re.escape(words)):
        flatten_call((argument,), {}, CPU)
    with pytest.raises(NotOurs, match=re.escape(words.replace("argument 0", "control"))):
        flatten_call((), {"control": argument}, CPU)
    with pytest.raises(NotOurs, match="the result is a builtins.object"):
        flatten_output(object())


def test_a_large_tensor_elsewhere_is_not_ours_but_a_timestep_is():
    gpu = torch.device("cuda", 0)
    flatten_call((torch.zeros(2),), {}, gpu)
    with pytest.raises(NotOurs, match="cpu"):
        flatten_call((torch.zeros(2000),), {}, gpu)


def test_outputs_come_back_in_their_form():
    tree, leaves = flatten_output((torch.ones(1), {"sample": torch.zeros(2)}))
    back = rebuild_output(tree, [t + 1 for t in leaves])
    assert back[0].item() == 2 and back[1]["sample"].tolist() == [1, 1]


def test_words_name_shapes_and_arguments():
    words = signature(torch.zeros(2, 4, dtype=torch.float16), 5, context=torch.zeros(1), flag=True).words()
    assert words == "#0 f16[2,4], #1 int, context f32[1], flag=True"
