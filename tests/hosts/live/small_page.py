"""A small page of Gradio alone, with the real session, settings, tab, API and JavaScript, and no model: it starts in
seconds where a WebUI takes half a minute.

    python tests/hosts/live/small_page.py 7860

Runs under the interpreter of a WebUI, whose Gradio it is made of. What a WebUI has around it is as little as the
JavaScript and the steps of `test_browser.py` need: a button that makes an image of nothing, an infotext, settings.

SFAST_SMALL_PAGE_SHOWS names a file of `python -m benchmarks.tab`: badge and tab show what it holds.
"""

# ruff: noqa: E402 (what is imported needs what stands before it)
from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "SFAST_CACHE_DIR" not in os.environ:
    # what is measured here is invented, and the user's own folder has measurements that are not
    os.environ["SFAST_CACHE_DIR"] = tempfile.mkdtemp(prefix="sfast-small-page-")
    atexit.register(shutil.rmtree, os.environ["SFAST_CACHE_DIR"], ignore_errors=True)
    # who ends it by a signal leaves nothing behind either
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import gradio as gr
import gradio.routes

STAGES = ("recording", "compiling kernels", "comparing with the original")
# for a person or a browser; who only asks has no need to wait so long
PACE = float(os.environ.get("SFAST_SMALL_PAGE_PACE", "1"))
SHOWS = os.environ.get("SFAST_SMALL_PAGE_SHOWS")
STAGE_S, STEP_S, JOB_S, STEPS = 1.2 * PACE, 0.2 * PACE, 1.0 * PACE, 6
HOST_JS = """
function gradioApp() { return document.querySelector('gradio-app'); }
const uiLoaded = [], uiUpdated = [];
function onUiLoaded(callback) { uiLoaded.push(callback); }
function onAfterUiUpdate(callback) { uiUpdated.push(callback); }
function onOptionsChanged() {}
document.addEventListener('DOMContentLoaded', () => {
    let loaded = false;
    new MutationObserver(() => {
        if (!loaded && document.querySelector('#txt2img_generate')) {
            loaded = true;
            uiLoaded.forEach((callback) => callback());
        }
        if (loaded) uiUpdated.forEach((callback) => callback());
    }).observe(document.body, {childList: true, subtree: true});
});
"""


class OptionInfo:
    """As AUTOMATIC1111 has it."""

    def __init__(self, default: Any, label: str, component: Any = None, arguments: Any = None, section: Any = None):
        self.default, self.label, self.component, self.arguments = default, label, component, arguments or {}
        self.section, self.infotext = section, None

    def info(self, text: str) -> OptionInfo:
        """With a comment."""
        self.label = f"{self.label} ({text})"
        return self


class Options:
    """`shared.opts`."""

    def __init__(self) -> None:
        self.data_labels: dict[str, OptionInfo] = {}
        self.sfast_allow_cpu = True

    def add_option(self, key: str, option: OptionInfo) -> None:
        """Register it."""
        self.data_labels[key] = option
        self.__dict__.setdefault(key, option.default)


def modules() -> None:
    """Stand-ins of what the session imports of a WebUI."""
    state = types.SimpleNamespace(job="", textinfo=None, interrupted=False, skipped=False)
    state.begin = lambda name: setattr(state, "job", name)
    state.end = lambda: setattr(state, "job", "")
    state.interrupt = lambda: setattr(state, "interrupted", True)
    made = types.SimpleNamespace(opts=Options(), OptionInfo=OptionInfo, state=state)
    package = types.ModuleType("modules")
    queue = types.SimpleNamespace(queue_lock=threading.Lock())
    package.shared, package.call_queue = made, queue  # type: ignore[attr-defined]
    sys.modules.update({"modules": package, "modules.shared": made, "modules.call_queue": queue})  # type: ignore[dict-item]


modules()
from modules import call_queue, shared
from PIL import Image

from sfast_ext.hosts import last_request
from sfast_ext.hosts.session import Session
from sfast_ext.jobs import rehearsals
from sfast_ext.ui import api, settings, settings_table
from sfast_ext.ui.comparison import Made
from sfast_ext.ui.requests import Refused


class Network:
    """In place of an attachment: plans of images that are not made."""

    def __init__(self) -> None:
        self.plans: dict[str, dict[str, Any]] = {}

    def status(self) -> list[dict[str, Any]]:
        """As an attachment's."""
        pace = next((1 / STEP_S for plan in self.plans.values() if plan["last_pass"]), None)
        return [{"name": "unet", "plans": list(self.plans.values()), "calls_per_s": pace, "graph_pool": None}]

    def add(self, label: str) -> dict[str, Any]:
        """A plan that is ready."""
        known = {"signature": "", "state": "replaying", "ms_before": 31.0, "ms_after": 14.8, "speedup": 2.1}
        more = {"replays": 0, "last_pass": False, "used_at": None, "memory_mb": 12.0, "error": 0.001}
        return self.plans.setdefault(label, {"label": label, **known, **more})

    def drop_plans(self) -> int:
        """All."""
        dropped, self.plans = len(self.plans), {}
        return dropped

    def release(self) -> None:
        """Nothing is held."""


class Rehearsals(rehearsals.Rehearsals):
    """Real jobs, without a model."""

    def _start(self, kind: str, wanted: Any, _work: Any, end: Any = lambda _job: None) -> dict[str, Any]:
        if not page.network.plans:
            raise Refused("make one image with this model first")

        def step(number: int) -> dict[str, Any] | None:
            each = wanted[number]
            time.sleep(JOB_S)
            page.network.add(each.label)
            row = {"label": each.label, "size": f"{each.width}x{each.height}", "images": each.images}
            row |= {"tokens": each.tokens, "ready": True, "reason": None}
            times = {"ms_before": 31.0, "ms_after": 14.8, "speedup": 31.0 / 14.8}
            return None if self.jobs.stopped() else {**row, **(times if kind == "measure" else {})}

        def keep(job: Any) -> None:
            if kind == "measure":
                import torch

                self.measurements.add(torch.nn.Linear(2, 2), job.rows, page.version, page.HOST)

        return self.jobs.start(kind, [each.label for each in wanted], lambda: contextlib.nullcontext(step), keep)


class LastRequest(last_request.LastRequest):
    """A real comparison, of images of nothing."""

    def again(self, accelerated: bool) -> Made:
        """An image that depends on the extension in one pixel."""
        time.sleep(JOB_S * (1 if accelerated else 2.1))
        image = Image.linear_gradient("L").convert("RGB")
        image.putpixel((3, 3), (9 if accelerated else 12, 0, 0))
        steps = {"accelerated": STEPS, "prepared": 0, "original": 0} if accelerated else {"original": STEPS}
        seconds = 14.8 if accelerated else 31.0
        return Made(image, seconds, {"prepared": 0, **steps}, None, ())


class Small(Session):
    """The session of the page."""

    HOST = "a small page"

    def __init__(self) -> None:
        super().__init__("0")
        self.network = Network()
        self.attachments = (self.network,)  # type: ignore[assignment]
        self.rehearsals = Rehearsals(self, self.rehearsals.jobs)
        self.last_request = LastRequest(self)
        self.shown = json.loads(Path(SHOWS).read_text(encoding="utf-8")) if SHOWS else None
        if self.shown is not None:
            self.show()
            self.rehearsals.measurements.all = lambda: self.shown["measurements"]  # type: ignore[method-assign]
        settings.register(shared.opts, OptionInfo)

    def status(self, names: bool = True) -> dict[str, Any]:
        """What is shown, or what the session has."""
        return super().status(names) if self.shown is None else dict(self.shown["status"])

    def show(self) -> None:
        """Show what the file holds as it was right after its last image."""
        plans = [plan for each in self.shown["status"]["accelerators"] for plan in each.get("plans", ())]
        late = time.time() - 1 - max(plan["used_at"] for plan in plans if plan["used_at"])
        for plan in plans:
            plan["used_at"] = plan["used_at"] and plan["used_at"] + late

    def host_version(self) -> str:
        """Gradio's."""
        return str(gr.__version__)

    def model_name(self) -> str:
        """None is loaded."""
        return "a model"

    def generate(self, prompt: str, width: float, height: float) -> tuple[str, str]:
        """An image, or what is seen of it while it is made."""
        with call_queue.queue_lock, self._job():
            self.report.new_generation()
            label = f"{int(width)}x{int(height)}, 1 image, 77 tokens"
            if self.config().enabled:
                if label not in self.network.plans:
                    self._prepare(label)
                made = self.network.add(label)
                for plan in self.network.plans.values():
                    plan["last_pass"] = plan is made
                self._steps(made)
            self.last_request._request = self
            named = settings.infotext(self.config())
            text = ", ".join(["Steps: 6", *(f"{key}: {value}" for key, value in named.items())])
            return f"<p>{prompt.splitlines()[0] if prompt else ''}<br>{text}</p>", text

    @contextlib.contextmanager
    def _job(self) -> Iterator[None]:
        shared.state.begin("an image")
        try:
            yield
        finally:
            shared.state.end()

    def _prepare(self, label: str) -> None:
        began = time.monotonic()
        for stage in STAGES:
            self.report.preparing(label, stage, began)
            time.sleep(STAGE_S)
        self.report.preparing(None)
        self.report.count("captures")

    def _steps(self, plan: dict[str, Any]) -> None:
        for _ in range(STEPS):
            time.sleep(STEP_S)
            self.report.count("replays")
            plan["replays"] += 1
        plan["used_at"] = time.time()


def setting(key: str, option: OptionInfo) -> Any:
    """The component of a setting."""
    kind = option.component or gr.HTML
    if kind is gr.HTML:
        return gr.HTML(option.default, elem_id=f"setting_{key}")
    return kind(label=option.label, value=option.default, elem_id=f"setting_{key}", **option.arguments)


def blocks() -> Any:
    """The page."""
    # outside of it, as WebUIs do: made inside, they would be rendered twice
    tabs = page._tab()
    with gr.Blocks(analytics_enabled=False, css=(ROOT / "style.css").read_text(encoding="utf-8")) as made:
        quicksettings = {}
        with gr.Tabs(elem_id="tabs"):
            with gr.TabItem("txt2img", elem_id="tab_txt2img"):
                with gr.Row():
                    prompt = gr.Textbox(label="Prompt", elem_id="txt2img_prompt")
                    with gr.Column(elem_id="txt2img_actions_column"), gr.Row(elem_id="txt2img_generate_box"):
                        button = gr.Button("Generate", elem_id="txt2img_generate")
                paste = gr.Button("Read the infotext", elem_id="paste")
                gr.Slider(1, 50, 6, label="Steps", elem_id="txt2img_steps")
                width = gr.Slider(64, 1024, 512, label="Width", elem_id="txt2img_width")
                height = gr.Slider(64, 1024, 512, label="Height", elem_id="txt2img_height")
                shown = gr.HTML("", elem_id="html_info_txt2img")
                infotext = gr.State("")
            for interface, title, key in tabs:
                with gr.TabItem(title, elem_id=f"tab_{key}"):
                    interface.render()
            with gr.TabItem("Settings", elem_id="tab_settings"):
                submit = gr.Button("Apply settings", elem_id="settings_submit")
                told = gr.HTML("", elem_id="settings_result")
                with gr.Tabs(elem_id="settings"), gr.TabItem("Stable Fast", elem_id="settings_stable_fast"):  # noqa: SIM117
                    with gr.Column(elem_id="column_settings_stable_fast"):
                        for key, option in shared.opts.data_labels.items():
                            component = setting(key, option)
                            if key in settings_table.KEYS:
                                quicksettings[key] = component

        def apply(*values: Any) -> str:
            for key, value in zip(quicksettings, values):
                setattr(shared.opts, key, value)
            return f"<p>{len(values)} settings changed</p>"

        def restore(text: str) -> Any:
            first, _, rest = text.partition("\n")
            params = dict(each.split(": ", 1) for each in rest.split(", ") if ": " in each)
            settings.restored(params)
            for each in settings_table.SETTINGS:
                if each.infotext in params:
                    value = params[each.infotext]
                    setattr(shared.opts, each.key, float(value) if each.slider else value)
            return first

        shared.opts.sfast_allow_cpu = True
        quicksettings["sfast_allow_cpu"].value = True
        button.click(page.generate, [prompt, width, height], [shown, infotext])
        paste.click(restore, [prompt], [prompt])
        submit.click(apply, list(quicksettings.values()), [told])
    return made


def main() -> None:
    """Serve the page until the process is ended."""
    files = sorted((ROOT / "javascript").glob("*.js"))
    code = "\n".join([HOST_JS, *(file.read_text(encoding="utf-8") for file in files)])
    template = gradio.routes.templates.TemplateResponse

    def with_script(*args: Any, **kwargs: Any) -> Any:
        answer = template(*args, **kwargs)
        answer.body = answer.body.replace(b"</head>", f"<script>{code}</script></head>".encode())
        answer.init_headers()
        return answer

    gradio.routes.templates.TemplateResponse = with_script
    app, _, _ = blocks().queue().launch(server_port=int(sys.argv[-1]), prevent_thread_lock=True, quiet=True)
    api.register(app, page.source)
    print("ready", flush=True)
    threading.Event().wait()


page = Small()

if __name__ == "__main__":
    main()
