"""When the page asks for the status, in node."""

from __future__ import annotations

from test_javascript import run


def test_one_request_at_the_start_and_none_while_idle():
    shown = run("await tick(); shown.urls = fetched; shown.timers = timers.size;")
    assert shown == {"urls": ["./sfast/v1/status"], "timers": 0}


def test_it_asks_while_an_image_is_made_and_stops_after():
    script = """
        on.click({target: buttons[1]});
        shown.started = timers.size;
        status.busy = true;
        for (let i = 0; i < 9; i++) await tick();
        shown.working = timers.size;
        status.busy = false;
        for (let i = 0; i < 5; i++) await tick();
        shown.ended = timers.size;
    """
    assert run(script) == {"started": 1, "working": 1, "ended": 0}


def test_a_job_that_begins_late_is_waited_for_but_not_for_ever():
    script = """
        on.click({target: buttons[0]});
        for (let i = 0; i < 15; i++) await tick();
        shown.waiting = timers.size;
        status.busy = true;
        await tick();
        status.busy = false;
        for (let i = 0; i < 4; i++) await tick();
        shown.after = timers.size;
        await tick();
        shown.ended = timers.size;
        on.click({target: buttons[0]});
        for (let i = 0; i < 20; i++) await tick();
        shown.nothing = timers.size;
    """
    assert run(script) == {"waiting": 1, "after": 1, "ended": 0, "nothing": 0}


def test_another_click_starts_nothing():
    assert run("on.click({target: body}); shown.timers = timers.size;") == {"timers": 0}


def test_nothing_is_asked_while_the_page_is_hidden():
    script = """
        on.click({target: buttons[0]});
        document.hidden = true;
        const before = fetched.length;
        await tick();
        shown.hidden = fetched.length - before;
        document.hidden = false;
        on.visibilitychange();
        await settle();
        shown.back = fetched.length - before;
    """
    assert run(script) == {"hidden": 0, "back": 1}


def test_nothing_is_asked_of_a_webui_that_reloads_its_ui():
    script = """
        on.click({target: buttons[0]});
        await tick();
        const before = fetched.length;
        body.children.forEach((each) => each.remove());
        for (let i = 0; i < 30; i++) await tick();
        on.visibilitychange();
        await settle();
        Object.assign(shown, {before, asked: fetched.length - before, timers: timers.size});
    """
    assert run(script) == {"before": 2, "asked": 0, "timers": 0}


def test_a_server_that_does_not_answer_is_asked_once():
    script = """
        on.click({target: buttons[0]});
        await tick();
        const before = fetched.length;
        const own = fetch;
        let answer;
        globalThis.fetch = (url) => new Promise((resolve) => { answer = () => resolve(own(url)); fetched.push(url); });
        for (let i = 0; i < 20; i++) await tick();
        shown.unanswered = fetched.length - before;
        globalThis.fetch = own;
        answer();
        await settle();
        await settle();
        await tick();
        shown.answered = fetched.length - before;
    """
    assert run(script) == {"unanswered": 1, "answered": 3}
