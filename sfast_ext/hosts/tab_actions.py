"""What the buttons of the tab do in a host."""

from __future__ import annotations

from sfast_ext.ui import api, tab


def actions(source: api.Source) -> tab.Actions:
    """Those of a session."""
    jobs = source.jobs

    def switch(on: bool) -> None:
        from modules import shared

        # as a request's override, which the host does not write to its file
        shared.opts.sfast_enabled = on
        source.recent.forget()

    given = source.drop, source.report, jobs.prepare, jobs.measure, jobs.compare, jobs.cancel, switch
    return tab.Actions(*given, source.page_may_read)
