#!/usr/bin/env bash
# torch 2.13.0: the level of forward-mode AD belongs to the process, not to the thread that enters it.
#
# `torch.is_grad_enabled`, inference mode and autocast belong to a thread. `torch.autograd.forward_ad.dual_level` keeps its level
# in a global of its module. While one thread is within a level, `dual_level()` in another thread raises. A tensor that the other
# thread makes dual without a level of its own gets its tangent in the first thread's level.
# One would expect that two threads can differentiate two functions at the same time.
#
# Seen: "RuntimeError: Nested forward mode AD is not supported at the moment" in the second thread, and there
# `make_dual` outside of a level of that thread gives a tangent of 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import threading

import torch
from torch.autograd import forward_ad

seen = {}


def second_thread():
    try:
        with forward_ad.dual_level():
            seen["level"] = "entered"
    except RuntimeError as error:
        seen["level"] = f"{type(error).__name__}: {error}"
    dual = forward_ad.make_dual(torch.ones(1), torch.full((1,), 2.0))
    seen["tangent"] = forward_ad.unpack_dual(dual).tangent


with forward_ad.dual_level():
    thread = threading.Thread(target=second_thread)
    thread.start()
    thread.join()
print(f"torch {torch.__version__}: in a second thread {seen['level']}; the tangent there is {seen['tangent']}")
assert seen["level"] == "RuntimeError: Nested forward mode AD is not supported at the moment", "torch behaves otherwise now"
assert float(seen["tangent"]) == 2, "torch behaves otherwise now"
PYTHON
