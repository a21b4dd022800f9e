#!/usr/bin/env bash
# transformers 5.13.0: hidden states are collected by forward hooks that the first request for them leaves on every layer.
#
# `model(ids, output_hidden_states=True)` installs a forward hook on each layer, for ever. The hooks append to a list that only the
# forward of the outer model makes. So what stands in the place of the encoder's forward and gives the same result (a cache, a
# compiled graph, offloaded execution elsewhere) leaves `hidden_states` an empty tuple, without an error or a warning, although the
# encoder was asked for nothing else. In transformers 4 the encoder itself returned the hidden states.
# One would expect an exception, or hidden states as part of the encoder's result.
#
# Seen: 3 hidden states, then 0 with the encoder's result remembered; hooks on the layers [0, 0] before the first request and
# [1, 1] after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6 transformers==5.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import copy

import torch
import transformers
from transformers import CLIPTextConfig, CLIPTextModel

config = CLIPTextConfig(
    vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=9,
    bos_token_id=0, eos_token_id=19,
)
model, ids = CLIPTextModel(config).eval(), torch.arange(9)[None]
encoder = getattr(model, "text_model", model).encoder
before = [len(layer._forward_hooks) for layer in encoder.layers]
with torch.no_grad():
    whole = model(ids, output_hidden_states=True)
    after = [len(layer._forward_hooks) for layer in encoder.layers]
    result = copy.copy(encoder(inputs_embeds=whole.hidden_states[0], attention_mask=None))
    encoder.forward = lambda **kwargs: result
    remembered = model(ids, output_hidden_states=True)
print(
    f"transformers {transformers.__version__}: {len(whole.hidden_states)} hidden states; hooks on the layers {before}, then {after}; "
    f"with the encoder's result remembered {len(remembered.hidden_states)}"
)
assert len(whole.hidden_states) == 3 and before == [0, 0] and min(after) > 0, "transformers behaves otherwise now"
assert len(remembered.hidden_states) == 0, "transformers behaves otherwise now"
PYTHON
