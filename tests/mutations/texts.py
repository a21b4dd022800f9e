"""Conditions of text encoders."""

from __future__ import annotations

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "a layer of torch's attention gets what a LoRA adds once", "hosts/a1111/lora.py",
        "[weakref.ref(m) for m in named if id(m) not in inside]", "[weakref.ref(m) for m in named]",
        ("hosts/adapters/test_a1111_text.py::test_a_layer_of_torchs_attention_is_left_to_the_attention",
         "hosts/adapters/test_a1111_text.py::test_loras_are_in_what_a_plan_reads_and_gone_afterwards"),
    ),
    Mutation(
        "hooks that record for a forward around what is captured", "behaviour/key.py",
        "known = {id(patch) for patch in recording if id(patch.module) in inside}",
        "known = {id(patch) for patch in recording}",
        ("behaviour/test_recorded_outputs.py::test_what_is_inside_of_that_forward_runs_as_it_did",),
    ),
    Mutation(
        "the file of a hook that records", "behaviour/recorded_outputs.py",
        'isinstance(function, FunctionType) and function.__globals__.get("__name__") == _HOME',
        'isinstance(function, FunctionType) and _HOME in (function.__module__, function.__globals__.get("__name__"))',
        ("behaviour/test_recorded_outputs.py::test_a_hook_that_only_has_the_name_is_foreign",),
    ),
    Mutation(
        "blocks of another model in an embedder", "hosts/open_clip_towers.py",
        'if tower.model.transformer is not getattr(embedder.model, "transformer", None):', "if False:",
        ("hosts/adapters/test_text_encoders.py::test_blocks_of_another_model_run_at_once_and_are_followed",),
    ),
    Mutation(
        "an embedder's choice of a layer", "hosts/open_clip_towers.py",
        "if name not in values or values[name] is not value:", "if name not in values:",
        ("hosts/adapters/test_text_encoders.py::test_the_embedders_choice_of_a_layer_is_followed_at_once",),
    ),
    Mutation(
        "what else an embedder's method reads", "hosts/open_clip_towers.py",
        "if names & held or methods:", "if methods:",
        ("hosts/adapters/test_text_encoders.py::test_a_method_that_reads_more_of_the_embedder_is_left_alone",),
    ),
    Mutation(
        "a method that another package put on an embedder's class", "hosts/open_clip_towers.py",
        "if not isinstance(method, FunctionType) or written_by(method) not in _PACKAGES:",
        "if not isinstance(method, FunctionType):",
        ("hosts/adapters/test_text_encoders.py::test_a_method_that_another_package_put_on_the_class_is_left_alone",),
    ),
    Mutation(
        "embeddings that somebody replaced in a text model", "hosts/text_encoders.py",
        'if type(getattr(module.embeddings, "token_embedding", None)) is nn.Embedding else None', "",
        ("hosts/adapters/test_text_encoders.py"
         "::test_a_text_model_that_records_by_hooks_is_one_plan_unless_its_embeddings_are_replaced",),
    ),
    Mutation(
        "LoRA inside the layers of a text encoder", "hosts/a1111/adapter.py",
        "return self._weights_reason() or self._dormant.active()", "return self._dormant.active()",
        ("hosts/adapters/test_a1111_text.py::test_loras_inside_of_layers_are_bypassed",),
    ),
    Mutation(
        "text encoders with weights in eight bits", "hosts/forge/hooks.py",
        "odd = {p.dtype for p in network.parameters()} - COMPUTED", "odd = set()",
        ("hosts/adapters/test_forge_text.py::test_weights_in_eight_bits_are_bypassed",),
    ),
]  # fmt: skip
