"""Times of text encoders by their own forward and by plans: `PYTHONPATH=.:tests python -m benchmarks.text_encoders`.

Random weights, real widths, float16. A call is timed from its start to the end of the work of the GPU, the median of
calls in turns. The error is that of the last hidden state against the same weights in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from hosts.standins import text_encoders as layouts
from torch import nn

from sfast_ext.hooks import Hooks
from sfast_ext.hosts import text_encoders
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.report import Report
from sfast_ext.tools.lib import models
from sfast_ext.ui.settings_table import HostConfig

SIZES = {
    "CLIP-L": {"width": 768, "layers": 12, "heads": 12},
    "OpenCLIP-H": {"width": 1024, "layers": 24, "heads": 16},
    "OpenCLIP-G": {"width": 1280, "layers": 32, "heads": 20},
}


def transformers_model(name: str) -> Any:
    """As diffusers has it."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    size = SIZES[name]
    config = CLIPTextConfig(
        vocab_size=layouts.WORDS, hidden_size=size["width"], intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"], projection_dim=size["width"],
        hidden_act="quick_gelu" if name == "CLIP-L" else "gelu", bos_token_id=0, eos_token_id=layouts.END,
    )  # fmt: skip
    return models.randomise(CLIPTextModelWithProjection(config), 1)


CASES: dict[str, Callable[[], Any]] = {
    "CLIP-L, transformers": lambda: transformers_model("CLIP-L"),
    "CLIP-L, AUTOMATIC1111": lambda: layouts.clip_l(1, **SIZES["CLIP-L"]),
    "OpenCLIP-H, ldm": lambda: layouts.open_clip(1, "FrozenOpenCLIPEmbedder", **SIZES["OpenCLIP-H"]),
    "OpenCLIP-G, transformers": lambda: transformers_model("OpenCLIP-G"),
    "OpenCLIP-G, sgm": lambda: layouts.open_clip(1, **SIZES["OpenCLIP-G"]),
}


def states_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states in front of the last layer norm, of a call as a host makes it."""
    if hasattr(model, "model"):
        found = model.encode_with_transformer(tokens)
        return found["last"] if isinstance(found, dict) else found
    model = getattr(model, "transformer", model)
    return model(tokens, output_hidden_states=True).hidden_states[-1]


@torch.no_grad()
def measure(name: str, rows: int, device: str, seconds: float) -> dict[str, Any]:
    """One case."""
    with models.without_initialisation(torch.device(device)):
        model = CASES[name]().eval().requires_grad_(False)
    tokens = layouts.ids(1, rows).to(device)
    exact = states_of(model, tokens)
    model.half() if device == "cuda" else model.bfloat16()
    twin, report = copy.deepcopy(model), Report()
    encoders = TextEncoders(lambda module: Hooks(), report)

    def call(each: nn.Module) -> float:
        began = time.perf_counter()
        states_of(each, tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    config = HostConfig(allow_cpu=True)
    for _ in range(5):
        encoders.follow([model], config)
        call(model)
    plans = [plan for each in encoders.attachments[0].status() for plan in each["plans"]]
    times: dict[str, list[float]] = {"original": [], "plan": []}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times["plan"]) < 5:
        for what, each in (("original", twin), ("plan", model)):
            times[what].append(call(each))
    own, ours = states_of(twin, tokens), states_of(model, tokens)
    counters = report.as_dict()["counters"]
    encoders.release()
    return {
        "case": name,
        "rows": rows,
        "original_ms": round(statistics.median(times["original"]), 3),
        "plan_ms": round(statistics.median(times["plan"]), 3),
        "build_s": [plan["first_call_s"] for plan in plans],
        "on_the_gpu_ms": [(plan["ms_before"], plan["ms_after"]) for plan in plans],
        "graph": [plan["state"] for plan in plans],
        "fused": [{k: v for k, v in plan["fused"].items() if v} for plan in plans],
        "error_original": float((own - exact).norm() / exact.norm()),
        "error_plan": float((ours - exact).norm() / exact.norm()),
        "counters": {k: v for k, v in counters.items() if k.startswith("text")},
        "reasons": [str(each["message"]) for each in report.as_dict()["events"] if each["stage"] == "bypassed"],
        "last_error": report.as_dict()["last_error"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--rows", type=int, action="append", help="prompts, or chunks of long ones, read together")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json")
    asked = parser.parse_args()
    text_encoders.GAIN = float("inf")
    device, results = "cuda" if torch.cuda.is_available() else "cpu", []
    with layouts.packages():
        for name in asked.case or CASES:
            for rows in asked.rows or (1, 2, 8):
                found = measure(name, rows, device, asked.seconds)
                results.append(found)
                ratio = found["plan_ms"] / found["original_ms"]
                print(f"{name}, {rows}: {found['original_ms']} -> {found['plan_ms']} ms ({ratio:.2f}), "
                      f"by events {found['on_the_gpu_ms']}, built in {found['build_s']} s, "
                      f"error {found['error_original']:.2e} -> {found['error_plan']:.2e}, {found['graph']}, "
                      f"{found['counters']}", flush=True)  # fmt: skip
                for said in (*found["reasons"], found["last_error"]):
                    if said:
                        print("   ", str(said)[:300])
                if rows == (asked.rows or (1,))[0]:
                    print("   ", found["fused"])
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
