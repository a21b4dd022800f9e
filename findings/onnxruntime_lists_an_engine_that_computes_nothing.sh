#!/usr/bin/env bash
# onnxruntime 1.32.0 (the package for CPUs): its list of available engines begins with one that computes no operator of a model.
#
# `get_available_providers()` returns AzureExecutionProvider in front of CPUExecutionProvider, on a machine without a network. A
# session that asks for that provider alone is made without an error or a warning, says that it has it, and runs the model: the
# profile names the provider of each node, which is the CPU's for all. An engine that is not in the package at all
# (CUDAExecutionProvider) gives a UserWarning and runs on the CPU too.
# One would guess that a listed engine that a session accepts and reports computes something.
#
# Seen: available Azure, CPU; asked for Azure alone: session has Azure, CPU; nodes computed by CPU alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W error - <<'PYTHON'
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

AZURE, CPU = "AzureExecutionProvider", "CPUExecutionProvider"
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one_node", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
onnx.checker.check_model(model)

options = onnxruntime.SessionOptions()
options.enable_profiling = True
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[AZURE])
result = session.run(None, {"x": np.array([-1, 0, 1], np.float32)})[0]
events = json.loads(Path(session.end_profiling()).read_text())
computed_by = {event["args"]["provider"] for event in events if event.get("args", {}).get("provider")}
available = onnxruntime.get_available_providers()
print(f"onnxruntime {onnxruntime.__version__}: available {available}")
print(f"asked for {AZURE} alone: session has {session.get_providers()}, nodes computed by {sorted(computed_by)}")
assert result.tolist() == [0, 0, 1]
assert available[0] == AZURE and session.get_providers()[0] == AZURE, "onnxruntime behaves otherwise now"
assert computed_by == {CPU}, "onnxruntime behaves otherwise now"
PYTHON
