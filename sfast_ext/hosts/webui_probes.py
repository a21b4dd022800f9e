"""What all adapters rely on in their hosts, see `probes`: the callbacks of scripts, the settings, the queue."""

from __future__ import annotations

from sfast_ext.hosts.probes import Feature, Probe, has, passes, probe, takes

PAGE = Feature("status", "the badge, the API and the tab have nothing to show")
SETTINGS_PAGE = Feature("settings page", "the settings may be missing from the page after it is reloaded")
TAB = Feature("tab", "there is no tab")
PASTED = Feature("settings from infotexts", "settings are not read from the infotext of an image")
ANSWERS = Feature("answers", "the answers of the API and infotexts do not say how an image was made")
PER_REQUEST = Feature("settings of one request", "requests to the API have no settings for themselves")
JOBS = Feature("Prepare and Measure", "Prepare and Measure cannot be started")
SHOWN_ERRORS = Feature("errors", "errors are in the report alone")
BARS = Feature("lines around progress bars", "lines on the console may tear the progress bar")
XYZ = Feature("X/Y/Z plot", "the X/Y/Z plot has no axes for it")
VAE = Feature("VAE", "the VAE and the text encoders are not accelerated")
MEMORY = Feature("memory", "GPU memory held for fast replays is freed later than the WebUI needs it")
UPSCALED = Feature("upscalers' speed", "upscalers are not accelerated")
PREVIEWS = Feature("previews", "TAESD is not accelerated")
PREVIEW_MEMORY = Feature("previews' memory", "previews need the memory that gradients take")
VERSION = Feature("version", "the report does not name the version of the WebUI")

COMMON: tuple[Probe, ...] = (
    probe("modules.script_callbacks:on_script_unloaded", check=takes("callback")),
    probe("modules.script_callbacks:on_model_loaded", check=takes("callback")),
    probe("modules.shared:opts", check=has("add_option", "data_labels")),
    probe(
        "modules.shared:OptionInfo",
        "modules.options:OptionInfo",
        check=takes("default", "label", "component", "component_args", section=None),
    ),
    probe("modules.script_callbacks:on_app_started", check=takes("callback"), feature=PAGE),
    probe("modules.script_callbacks:on_ui_settings", check=takes("callback"), feature=SETTINGS_PAGE),
    probe("modules.script_callbacks:on_before_ui", check=takes("callback"), feature=XYZ),
    probe("modules.script_callbacks:on_infotext_pasted", check=takes("callback"), feature=PASTED),
    probe("modules.script_callbacks:on_ui_tabs", check=takes("callback"), feature=TAB),
    probe("modules.processing:process_images_inner", check=passes("p"), feature=ANSWERS),
    probe("modules.shared:state", check=has("begin", "end", "interrupt"), feature=JOBS),
    probe("modules.call_queue:queue_lock", check=has("__enter__", "__exit__"), feature=JOBS),
)
"""Of every host."""

REQUESTS: tuple[Probe, ...] = (
    probe("modules.scripts:Script", check=has("title", "show", "ui", "before_process"), feature=PER_REQUEST),
    probe("modules.scripts:AlwaysVisible", feature=PER_REQUEST),
)
"""Of hosts whose API has `alwayson_scripts`."""

WEBUI: tuple[Probe, ...] = (
    *COMMON,
    probe("modules.shared:cmd_opts"),
    probe("modules.script_callbacks:on_cfg_denoiser", check=takes("callback")),
    probe("modules.processing:process_images_inner", check=passes("p"), feature=VAE),
    probe("modules.sd_models:unload_model_weights", check=passes(), feature=MEMORY),
    probe("modules.sd_vae_taesd:decoder_model", check=passes(), feature=PREVIEWS),
    probe("modules.upscaler_utils:upscale_pil_patch", check=passes("model"), feature=UPSCALED),
    probe("modules.scripts:scripts_data", feature=XYZ),
    probe("modules.errors:display_once", check=takes("exc", "task"), feature=SHOWN_ERRORS),
    probe("modules.logging_config:TqdmLoggingHandler", feature=BARS),
)
"""Of AUTOMATIC1111's WebUI and its forks."""
