"""What keeps plans in Forge, reForge and Forge Neo right, and those of their VAEs and ControlNets."""

from __future__ import annotations

from mutations import Mutation

_PROGRAMS = "hosts/adapters/test_forge_programs.py::"
_BESIDE = "hosts/adapters/test_forge_secondary.py::"
_LATER = "hosts/adapters/test_forge_neo_later.py::"

MUTATIONS = [
    Mutation(
        "LoRA in the layers of Forge", "hosts/forge/programs.py",
        "if any(getattr(m, _ONLINE, None) for m in layers):", "if False:",
        (_PROGRAMS + "test_lora_in_the_layers_is_never_stale",),
    ),
    Mutation(
        "a change of LoRA between passes", "hosts/forge/programs.py",
        'return getattr(loader, "loaded_hash", None), None', "return None, None",
        (_PROGRAMS + "test_another_lora_in_the_middle_of_a_pass_is_seen",),
    ),
    Mutation(
        "functions around weights, in Forge Neo 2.29", "hosts/forge/programs.py",
        "if any(m.weight_function or m.bias_function for m in layers):\n        return reasons.LORA_IN_FP16()",
        "if False:\n        return reasons.LORA_IN_FP16()",
        (_LATER + "test_lora_in_the_layers_is_never_stale_even_if_its_strength_changes_between_steps",),
    ),
    Mutation(
        "functions around weights, in reForge", "hosts/forge/programs.py",
        "if any(m.weight_function or m.bias_function for m in layers):\n        hook", "if False:\n        hook",
        (_PROGRAMS + "test_weights_that_are_cast_or_come_in_parts_are_bypassed_while_they_do",),
    ),
    Mutation(
        "a ControlNet in parts, in Forge Neo", "hosts/forge/programs.py",
        'if getattr(holder, "model_lowvram", False):\n        return reasons.IN_PARTS()\n    layers = _casting',
        "if False:\n        return reasons.IN_PARTS()\n    layers = _casting",
        (_BESIDE + "test_a_network_that_is_loaded_in_parts_is_bypassed_until_it_is_loaded_whole",),
    ),
    Mutation(
        "functions around the forward, in reForge", "hosts/forge/hooks.py",
        'value = value.get("diffusion_model") if isinstance(value, dict) else value', "value = None",
        (_PROGRAMS + "test_functions_around_the_unet_s_forward_are_bypassed_and_those_around_others_are_not",),
    ),
    Mutation(
        "options that the forward reads", "hosts/forge/hooks.py",
        "elif self._reading.option(key):", "elif False:",
        (_PROGRAMS + "test_an_option_that_the_unet_s_code_reads_is_bypassed",),
    ),
    Mutation(
        "arguments that the forward reads", "hosts/forge/hooks.py",
        " or self._reading.option(k)", "",
        (_PROGRAMS + "test_an_argument_that_the_unet_s_code_reads_is_one_of_the_plan",),
    ),
    Mutation(
        "functions among options that nobody knows", "hosts/forge/hooks.py",
        "patch = _first(value, callable)", "patch = None",
        (_PROGRAMS + "test_a_function_among_options_that_nobody_knows_is_bypassed",),
    ),
    Mutation(
        "a UNet that torch.compile has", "hosts/forge/adapter.py",
        'compiled = hasattr(unet, "_orig_mod")', "compiled = False",
        (_PROGRAMS + "test_a_compiled_unet_is_left_to_torch_compile",),
    ),
    Mutation(
        "weights of a ControlNet that are cast", "hosts/forge/programs.py",
        "if casts or any(type(p) is not nn.Parameter or p.dtype is not computed for p in weights):", "if casts:",
        (_BESIDE + "test_a_network_whose_weights_are_cast_is_bypassed_and_the_unet_is_not",),
    ),
    Mutation(
        "ControlNets that the WebUI has dropped", "hosts/forge/secondary.py",
        "[: max(self._kept(), len(used))]", "",
        (_BESIDE + "test_networks_that_the_webui_has_dropped_are_not_held",),
    ),
    Mutation(
        "networks that run once for an image", "hosts/forge/secondary.py",
        'type(control).__name__ == "ControlNet" and ', "",
        (_BESIDE + "test_a_network_that_runs_once_for_an_image_is_left_alone",),
    ),
    Mutation(
        "dropout that draws, in place", "capture/capture.py",
        "return train is False or p == 0.0", "return True",
        ("capture/test_capture.py::test_a_dropout_that_is_on_is_refused_in_place_too",),
    ),
]  # fmt: skip
