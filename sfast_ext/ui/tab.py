"""The tab Stable Fast. javascript/stable_fast_tab.js draws its tables; its buttons ask the host's authentication."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfast_ext.ui import requests

TITLE, KEY = "Stable Fast", "stable_fast"
PASSWORD = (
    "The WebUI's API asks for a password. Open the address /sfast/v1/report of this WebUI in this browser and log in,"
    " then press the button again."
)
AFRESH = "<h3>Start afresh</h3> <span>Frees the GPU memory of all sizes. Each is prepared again when it is used.</span>"


@dataclass
class Actions:
    """What the buttons do."""

    drop: Callable[[], int]
    """Drops all plans and returns their number."""
    report: Callable[[], str]
    """Gives the text for a bug report."""
    prepare: Callable[[list[requests.Wanted]], object]
    """Starts a job, or raises `requests.Refused`."""
    measure: Callable[[list[requests.Wanted]], object]
    compare: Callable[[], object]
    """Starts a job that makes the last image with and without the extension."""
    cancel: Callable[[], bool]
    switch: Callable[[bool], object]
    """Switches the extension on or off until the host starts again."""
    may_read: Callable[[Any], bool] = lambda request: True
    """Whether who makes a request of Gradio's may read what the routes answer."""


def tabs(actions: Actions) -> list[tuple[Any, str, str]]:
    """What `on_ui_tabs` takes: the page, its title and its key. Empty without gradio."""
    try:
        import gradio
    except ImportError:
        return []

    def dropped() -> str:
        # each sentence in its own element: the host translates those that it finds
        again = "Each is made ready again when it is needed."
        return f"<span>Sizes forgotten:</span> {actions.drop()}. <span>{again}</span>"

    def reported(request: Any = None) -> str:
        return actions.report() if actions.may_read(request) else PASSWORD

    if hasattr(gradio, "Request"):
        # Gradio gives a request to an argument of this type
        reported.__annotations__["request"] = gradio.Request
    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.HTML('<div id="stable_fast_view">Loading ...</div>', elem_id="stable_fast_tables")
        with gradio.Row():
            off = gradio.Button("Switch off, for a comparison", elem_id="stable_fast_off")
            on = gradio.Button("Switch on", elem_id="stable_fast_on")
            refresh = gradio.Button("Refresh", elem_id="stable_fast_refresh")
        gradio.HTML("<h3>Prepare, measure and compare</h3>", elem_id="stable_fast_jobs")
        with gradio.Row():
            sizes = gradio.Textbox(
                label="Sizes, width x height, with commas between them",
                value="512x512",
                elem_id="stable_fast_sizes",
            )
            images = gradio.Textbox(
                label="Images at once, with commas between the numbers",
                value="1",
                elem_id="stable_fast_images",
            )
        tokens = gradio.CheckboxGroup(
            choices=[str(each) for each in requests.PROMPTS],
            label="Tokens of the prompt; none ticked: as many as in the last image",
            elem_id="stable_fast_tokens",
        )
        with gradio.Row():
            prepare = gradio.Button("Prepare", elem_id="stable_fast_prepare")
            measure = gradio.Button("Measure", variant="primary", elem_id="stable_fast_measure")
            compare = gradio.Button("Compare the last image with and without", elem_id="stable_fast_compare")
            cancel = gradio.Button("Cancel", elem_id="stable_fast_cancel")
        told = gradio.HTML("", elem_id="stable_fast_told")
        gradio.HTML('<div id="stable_fast_job"></div>', elem_id="stable_fast_progress")
        gradio.HTML("<h3>Report a bug</h3>", elem_id="stable_fast_bug")
        report = gradio.Button("Copy a report", elem_id="stable_fast_report")
        gradio.HTML('<div id="stable_fast_copied" role="status"></div>', elem_id="stable_fast_copied_box")
        text = gradio.Textbox(
            label="Report for a bug: versions, card, settings and reasons; no prompt, no names of files",
            lines=3,
            max_lines=24,
            # otherwise it could not be selected by keyboard, if the page may not write to the clipboard
            interactive=True,
            show_copy_button=True,
            elem_id="stable_fast_report_text",
            **_known(gradio.Textbox, autoscroll=False),  # it is read from its beginning
        )
        gradio.HTML(AFRESH, elem_id="stable_fast_afresh")
        drop = gradio.Button("Forget all ready sizes", variant="stop", elem_id="stable_fast_drop")
        drop_told = gradio.HTML("", elem_id="stable_fast_dropped")
        for each in (sizes, images, tokens, text, off, on, refresh, prepare, measure, compare, cancel, report, drop):
            # the WebUI would keep its text, or whether it is seen, in ui-config.json, also after the extension is gone
            each.do_not_save_to_config = True

        def after(event: Any, script: str, **more: Any) -> None:
            event.then(fn=None, **_script(refresh, script), **more)

        redraw, watch = "() => { stableFast.refresh(); }", "() => { stableFast.watch(); stableFastJobs.toFault(); }"
        refresh.click(fn=None, **_script(refresh, redraw))
        after(drop.click(fn=dropped, outputs=[drop_told], api_name=False), redraw)
        for button, wanted in ((on, True), (off, False)):
            after(button.click(fn=_switching(actions.switch, wanted), outputs=[told], api_name=False), redraw)
        for button, start in ((prepare, actions.prepare), (measure, actions.measure)):
            asked = {"inputs": [sizes, images, tokens], "outputs": [told], "api_name": False}
            after(button.click(fn=_starting(start), **asked), watch)
        after(compare.click(fn=_starting_alone(actions.compare), outputs=[told], api_name=False), watch)
        after(cancel.click(fn=lambda: _cancelled(actions.cancel()), outputs=[told], api_name=False), watch)
        copied = report.click(fn=reported, outputs=[text], api_name=False)
        after(copied, "(text) => { stableFast.copy(text); }", inputs=[text])
    return [(page, TITLE, KEY)]


def _starting(start: Callable[[list[requests.Wanted]], object]) -> Callable[[str, str, list[str]], str]:
    def started(sizes: str, images: str, tokens: list[str]) -> str:
        try:
            start(requests.from_text(sizes, images, tokens))
        except requests.Invalid as exc:
            return _fault("Not started:", str(exc), field=exc.field)
        except (ValueError, requests.Refused) as exc:
            return _fault("Not started:", str(exc))
        return ""

    return started


def _starting_alone(start: Callable[[], object]) -> Callable[[], str]:
    def started() -> str:
        try:
            start()
        except requests.Refused as exc:
            return _fault("Not started:", str(exc))
        return ""

    return started


def _switching(switch: Callable[[bool], object], wanted: bool) -> Callable[[], str]:
    def switched() -> str:
        try:
            switch(wanted)
        except Exception as exc:  # of a host that lets nobody change its settings
            return _fault("Not switched:", f"{type(exc).__name__}: {exc}")
        return ""

    return switched


def _fault(*texts: str, field: str = "") -> str:
    """What could not be done, as HTML: read out at once, and seen to be no success.

    Args:
        field: what was written wrong; the page puts the cursor there.
    """
    said = " ".join(f"<span>{html.escape(each)}</span>" for each in texts)
    place = ' data-field="stable_fast_' + field + '"' if field else ""
    return '<div class="sfast-error" role="alert"' + place + ">" + said + "</div>"


def _known(component: Any, **options: Any) -> dict[str, Any]:
    """Of these options those that this version of a component has: Gradio 3.41 warns of others."""
    known = inspect.signature(component.__init__).parameters
    return {name: value for name, value in options.items() if name in known}


def _script(button: Any, code: str) -> dict[str, str]:
    """An event's JavaScript, by the name that this version of Gradio has for it."""
    known = inspect.signature(button.click).parameters
    return {"js" if "js" in known and "_js" not in known else "_js": code}


def _cancelled(there_was: bool) -> str:
    return "Cancelled." if there_was else "Nothing is running."


def unseen() -> Any:
    """A component that holds a value and is not on the page."""
    import gradio

    return gradio.State(None)
