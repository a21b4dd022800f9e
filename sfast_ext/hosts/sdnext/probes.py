"""What the adapter relies on in SD.Next, see `sfast_ext.hosts.probes`."""

from __future__ import annotations

from sfast_ext.hosts.probes import Feature, Probe, has, passes, probe, takes
from sfast_ext.hosts.webui_probes import COMMON, PASTED, REQUESTS, VERSION

OFFLOAD = Feature("offload", "models that SD.Next offloads are not accelerated")
LOADING = Feature("loading", "sizes are prepared anew after another model was loaded")
WHOLE = Feature("whole UNets in 8 bits", "a UNet that SD.Next moves in parts is not accelerated in 8 bits")
IP_ADAPTERS = Feature("IP-Adapters", "IP-Adapters are loaded anew for each image")
LOG = Feature("log", "its lines are not in the log of SD.Next")
DEEPCACHE = Feature("DeepCache", "the reason does not name DeepCache")

PROBES: tuple[Probe, ...] = (
    *COMMON,
    *REQUESTS,
    probe("modules.modeldata:model_data", check=has("sd_model", "sd_refiner")),
    probe("modules.shared:state", check=has("total_jobs")),
    probe("modules.script_callbacks:on_before_process", check=takes("callback")),
    probe("modules.sd_models:reload_model_weights", check=passes(), feature=LOADING),
    probe("modules.sd_models:unload_model_weights", check=passes("op"), feature=LOADING),
    probe("modules.ipadapter:apply", check=passes("pipe", "p"), feature=IP_ADAPTERS),
    probe(
        "modules.sd_offload_balanced:move_module_to_cpu",
        "modules.sd_offload:move_module_to_cpu",
        check=passes("module"),
        feature=OFFLOAD,
    ),
    probe(
        "modules.sd_offload_balanced:apply_balanced_offload_to_module",
        "modules.sd_offload:apply_balanced_offload_to_module",
        check=takes("module", force=True),
        feature=WHOLE,
    ),
    probe("accelerate:dispatch_model", check=passes("model", later=["device_map"]), feature=OFFLOAD),
    probe("modules.sd_offload_aux:move_aux_to_gpu", check=passes("name"), feature=OFFLOAD),
    probe("modules.sd_offload_aux:aux_models", check=has("get"), feature=OFFLOAD),
    probe(
        "modules.generation_parameters_copypaste:infotext_to_setting_name_mapping",
        check=has("extend"),
        feature=PASTED,
    ),
    probe("modules.logger:log", check=has("addFilter", "removeFilter"), feature=LOG),
    probe("modules.sd_models_compile:deepcache_worker", feature=DEEPCACHE),
    probe("installer:version", check=has("get"), feature=VERSION),
)
