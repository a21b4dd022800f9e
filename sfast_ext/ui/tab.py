"""The tab Stable Fast. javascript/stable_fast_tab.js draws its tables; its buttons ask the host's authentication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TITLE, KEY = "Stable Fast", "stable_fast"


def tabs(drop: Callable[[], int], report: Callable[[], str]) -> list[tuple[Any, str, str]]:
    """What `on_ui_tabs` takes: the page, its title and its key. Empty without gradio.

    Args:
        drop: drops all plans and returns their number.
        report: gives the text for a bug report.
    """
    try:
        import gradio
    except ImportError:
        return []

    def dropped() -> str:
        return f"Plans dropped: {drop()}. They are made anew when they are needed."

    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.HTML('<div id="stable_fast_view">Loading ...</div>', elem_id="stable_fast_tables")
        with gradio.Row():
            refresh_button = gradio.Button("Refresh", elem_id="stable_fast_refresh")
            drop_button = gradio.Button("Drop plans", elem_id="stable_fast_drop")
            report_button = gradio.Button("Copy a report", elem_id="stable_fast_report")
        told = gradio.HTML("", elem_id="stable_fast_told")
        text = gradio.Textbox(
            label="Report for a bug: versions, card, settings and reasons; no prompt, no names of files",
            lines=8,
            max_lines=24,
            interactive=False,
            show_copy_button=True,
            elem_id="stable_fast_report_text",
        )
        # the WebUI would keep its text in ui-config.json
        text.do_not_save_to_config = True
        refresh = "() => { stableFast.refresh(); }"
        refresh_button.click(fn=None, _js=refresh)
        drop_button.click(fn=dropped, outputs=[told], api_name=False).then(fn=None, _js=refresh)
        report_button.click(fn=report, outputs=[text], api_name=False).then(
            fn=None, _js="(text) => { stableFast.copy(text); }", inputs=[text]
        )
    return [(page, TITLE, KEY)]
