"""The tab Stable Fast. javascript/stable_fast_tab.js draws its tables; its buttons ask the host's authentication."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfast_ext.ui import chart, requests

TITLE, KEY = "Stable Fast", "stable_fast"
PASSWORD = (
    "The WebUI's API asks for a password. Open the address /sfast/v1/report of this WebUI in this browser and log in,"
    " then press the button again."
)
NO_CHART = "There is nothing to draw: no size was measured yet, or matplotlib is not installed."


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
    cancel: Callable[[], bool]
    measurements: Callable[[], list[dict[str, Any]]]
    """Those that were kept, oldest first."""
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
        return f"<span>Plans dropped:</span> {actions.drop()}. <span>They are made anew when they are needed.</span>"

    def drawn(request: Any = None) -> tuple[Any, str]:
        if not actions.may_read(request):
            return gradio.update(visible=False), PASSWORD
        figure = chart.figure(actions.measurements())
        return gradio.update(value=figure, visible=figure is not None), "" if figure is not None else NO_CHART

    def reported(request: Any = None) -> str:
        return actions.report() if actions.may_read(request) else PASSWORD

    if hasattr(gradio, "Request"):
        # Gradio gives a request to an argument of this type
        for each in (drawn, reported):
            each.__annotations__["request"] = gradio.Request
    refresh, watch = "() => { stableFast.refresh(); }", "() => { stableFast.watch(); }"
    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.HTML('<div id="stable_fast_view">Loading ...</div>', elem_id="stable_fast_tables")
        with gradio.Row():
            refresh_button = gradio.Button("Refresh", elem_id="stable_fast_refresh")
            drop_button = gradio.Button("Drop plans", elem_id="stable_fast_drop")
        drop_told = gradio.HTML("", elem_id="stable_fast_dropped")
        gradio.HTML("<h3>Prepare and measure</h3>", elem_id="stable_fast_jobs")
        with gradio.Row():
            sizes = gradio.Textbox(
                label="Sizes, width x height, with commas between them",
                value="512x512",
                elem_id="stable_fast_sizes",
            )
            pictures = gradio.Textbox(
                label="Images at once, with commas between the numbers",
                value="1",
                elem_id="stable_fast_pictures",
            )
        tokens = gradio.CheckboxGroup(
            choices=[str(each) for each in requests.PROMPTS],
            label="Tokens of the prompt; none ticked: as many as in the last image",
            elem_id="stable_fast_tokens",
        )
        with gradio.Row():
            prepare_button = gradio.Button("Prepare", elem_id="stable_fast_prepare")
            measure_button = gradio.Button("Measure", elem_id="stable_fast_measure")
            cancel_button = gradio.Button("Cancel", elem_id="stable_fast_cancel")
            chart_button = gradio.Button("Draw the last measurement", elem_id="stable_fast_chart")
        told = gradio.HTML("", elem_id="stable_fast_told")
        gradio.HTML('<div id="stable_fast_job"></div>', elem_id="stable_fast_progress")
        plot = gradio.Plot(label="Milliseconds a step", visible=False, elem_id="stable_fast_plot")
        gradio.HTML("<h3>Report a bug</h3>", elem_id="stable_fast_bug")
        report_button = gradio.Button("Copy a report", elem_id="stable_fast_report")
        text = gradio.Textbox(
            label="Report for a bug: versions, card, settings and reasons; no prompt, no names of files",
            lines=8,
            max_lines=24,
            # otherwise it could not be selected by keyboard, if the page may not write to the clipboard
            interactive=True,
            # it is read from its beginning
            autoscroll=False,
            show_copy_button=True,
            elem_id="stable_fast_report_text",
        )
        buttons = (
            refresh_button,
            drop_button,
            prepare_button,
            measure_button,
            cancel_button,
            chart_button,
            report_button,
        )
        for each in (sizes, pictures, tokens, text, *buttons):
            # the WebUI would keep its text, or whether it is seen, in ui-config.json, also after the extension is gone
            each.do_not_save_to_config = True
        refresh_button.click(fn=None, _js=refresh)
        drop_button.click(fn=dropped, outputs=[drop_told], api_name=False).then(fn=None, _js=refresh)
        for button, start in ((prepare_button, actions.prepare), (measure_button, actions.measure)):
            asked = {"inputs": [sizes, pictures, tokens], "outputs": [told], "api_name": False}
            button.click(fn=_starting(start), **asked).then(fn=None, _js=watch)
        cancel_button.click(fn=lambda: _cancelled(actions.cancel()), outputs=[told], api_name=False).then(
            fn=None, _js=watch
        )
        chart_button.click(fn=drawn, outputs=[plot, told], api_name=False)
        report_button.click(fn=reported, outputs=[text], api_name=False).then(
            fn=None, _js="(text) => { stableFast.copy(text); }", inputs=[text]
        )
    return [(page, TITLE, KEY)]


def _starting(start: Callable[[list[requests.Wanted]], object]) -> Callable[[str, str, list[str]], str]:
    def started(sizes: str, pictures: str, tokens: list[str]) -> str:
        try:
            start(requests.from_text(sizes, pictures, tokens))
        except (ValueError, requests.Refused) as exc:
            return f"<span>Not started:</span> <span>{html.escape(str(exc))}</span>"
        return "Started."

    return started


def _cancelled(there_was: bool) -> str:
    return "Cancelled." if there_was else "Nothing is running."


def unseen() -> Any:
    """A component that holds a value and is not on the page."""
    import gradio

    return gradio.State(None)
