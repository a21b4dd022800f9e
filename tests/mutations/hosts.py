"""What an adapter knows of its host, without which a plan would run that the host does not ask for."""

from __future__ import annotations

from mutations import Mutation

_OFFLOAD = "hosts/adapters/test_sdnext_offload.py::"

MUTATIONS = [
    Mutation(
        "memory that a plan holds of a UNet which is moved whole", "hosts/gpu_room.py",
        "free += (0 if found is None else found.arena.held_bytes) - _size(module)", "free -= _size(module)",
        ("hosts/adapters/test_sdnext_memory.py"
         "::test_a_unet_that_is_moved_whole_is_not_bypassed_for_what_its_own_plan_holds",),
    ),
    Mutation(
        "hooks of sequential offload that stay", "hosts/sdnext/refusals.py",
        "return reasons.OFFLOAD_OF_PARTS() if in_parts else reasons.OFFLOAD_BY_LAYERS_STILL()",
        "return reasons.OFFLOAD_OF_PARTS()",
        ("hosts/adapters/test_sdnext.py::test_hooks_that_only_move_arguments_are_vouched_for",),
    ),
    Mutation(
        "sparse attention", "hosts/sdnext/refusals.py",
        'if getattr(opts, "sparse_attention_enabled", False) else None', "if False else None",
        (_OFFLOAD + "test_sparse_attention_is_bypassed_while_it_is_on",),
    ),
    Mutation(
        "hooks of groups of layers", "hosts/sdnext/refusals.py",
        "any(GROUP_HOOKS & hook_names(m) for m in network.modules())", "False",
        (_OFFLOAD + "test_group_offload_is_bypassed_and_left",),
    ),
    Mutation(
        "registries that have no hook any more", "hosts/sdnext/refusals.py",
        'frozenset(getattr(registry, "hooks", ("unknown",)))', 'frozenset(("unknown",))',
        (_OFFLOAD + "test_group_offload_comes_and_goes_without_a_load",),
    ),
    Mutation(
        "registries of another kind", "hosts/sdnext/refusals.py",
        'getattr(registry, "hooks", ("unknown",))', 'getattr(registry, "hooks", ())',
        ("hosts/adapters/test_sdnext_vae.py::test_a_hook_that_moves_layers_is_a_reason",),
    ),
    Mutation(
        "a network that is brought for each call", "hosts/sdnext/refusals.py",
        'getattr(network, "sdnext_ondemand", False)', "False",
        (_OFFLOAD + "test_what_is_brought_for_each_call_is_bypassed",),
    ),
    Mutation(
        "a VAE that is brought on demand", "hosts/sdnext/adapter.py",
        "reason = model_bypass_reason(network, shared.opts)",
        'reason = model_bypass_reason(getattr(network, "decoder", network), shared.opts)',
        (_OFFLOAD + "test_a_vae_that_is_brought_on_demand_runs_by_itself_beside_an_accelerated_unet",),
    ),
    Mutation(
        "hooks of offload by models", "hosts/sdnext/refusals.py",
        'mode == "model" or any(', 'mode == "model" and any(',
        ("hosts/adapters/test_sdnext.py::test_hooks_of_offload_by_models_outlive_their_mode",),
    ),
    Mutation(
        "what plans hold after the host ran out of memory", "hosts/sdnext/offload.py",
        "self._guarded(lambda: self._make_room(math.inf))\n            if", "if",
        ("hosts/adapters/test_sdnext_memory.py::test_each_time_the_host_runs_out_of_memory_it_gets_what_plans_hold",),
    ),
    Mutation(
        "a block for which there is no room", "hosts/gpu_room.py",
        "if factor * needed <= torch.cuda.mem_get_info(host_gpu.device())[0]:", "if True:",
        ("hosts/adapters/test_gpu_room.py::test_a_vae_on_a_small_card_leaves_memory_to_others_and_takes_one_block",),
    ),
    Mutation(
        "classes of SDNQ", "hosts/sdnext/sdnq_layers.py",
        'or is_class_of_sdnq(type(module))', "",
        (_OFFLOAD + "test_a_layer_of_sdnq_is_told_by_its_class",),
    ),
    Mutation(
        "formats of SDNQ", "hosts/sdnext/sdnq_layers.py",
        "if value != known:", "if False:",
        ("hosts/adapters/test_sdnext_sdnq.py::test_another_format_is_named",),
    ),
    Mutation(
        "what SDNQ adds to a product", "hosts/sdnext/sdnq_layers.py",
        "if getattr(layer, name, None) is not None:", "if False:",
        ("hosts/adapters/test_sdnext_sdnq.py::test_what_is_added_is_named",),
    ),
    Mutation(
        "a VAE in 8 bits", "hosts/vae.py",
        "eight_bits=False,", "",
        ("hosts/adapters/test_a1111_vae.py::test_its_sums_stay_in_full_precision_whatever_the_steps_have",),
    ),
    Mutation(
        "entries of another image", "hosts/answers.py",
        "p.extra_generation_params = {**others, **named}", "p.extra_generation_params.update(named)",
        ("hosts/adapters/test_answers.py::test_the_images_of_a_grid_name_their_own_settings_alone",),
    ),
    Mutation(
        "plans of another arithmetic", "config.py",
        "self.faster_sums, self.eight_bits, self", "self.faster_sums, self",
        ("ui/test_settings.py::test_presets_that_change_pixels_are_named_in_the_infotext",),
    ),
    Mutation(
        "gradients of a latent", "hosts/previews.py",
        "and not sample.requires_grad and", "and",
        ("hosts/adapters/test_previews.py::test_a_latent_that_takes_gradients_keeps_them",),
    ),
    Mutation(
        "an upscaler's sums in full precision", "hosts/convolution_networks.py",
        "faster_sums=False,", "",
        ("hosts/adapters/test_upscalers.py::test_its_sums_stay_in_full_precision_whatever_the_steps_have",),
    ),
    Mutation(
        "8 bits for an upscaler", "hosts/convolution_networks.py",
        "eight_bits=False,", "",
        ("hosts/adapters/test_upscalers.py::test_its_sums_stay_in_full_precision_whatever_the_steps_have",),
    ),
    Mutation(
        "a patched upscaler", "hosts/convolution_networks.py",
        "(is_host_code(function) or wraps_torchs(function))", "True",
        ("hosts/adapters/test_upscalers.py::test_a_patch_by_somebody_else_is_bypassed_by_name_and_the_host_s_is_not",),
    ),
]  # fmt: skip
