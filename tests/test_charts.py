"""The charts of the tab and the comparison of two images, in node."""

from __future__ import annotations

import pytest
from test_javascript import STATUS, run

OPEN = """
    observers.forEach((each) => each([{isIntersecting: true}]));
    await settle();
    const job = document.getElementById('stable_fast_job');
    shown.job = job.textContent;
    shown.widths = job.all().filter((each) => each.style.width).map((each) => each.style.width);
    shown.svg = byTag('svg', job).map((svg) => ({
        ...svg.attributes, texts: byTag('text', svg).map((each) => each.text),
        lines: byTag('polyline', svg).map(
            (each) => each.attributes.points.split(' ').map((at) => at.split(',').map(Number))
        ),
        changes: byTag('line', svg).filter((each) => each.attributes.class === 'sfast-change').length,
        dots: byTag('title', svg).map((each) => each.text)
    }));
    shown.images = byTag('img', job).map((each) => each.src.split('?')[0]);
"""


def row(label="512x512, 1 image", before=31.0, after=14.8, **more):
    return {"label": label, "ready": True, "reason": None, "ms_before": before, "ms_after": after, **more}


def measured(*rows, when="2026-11-20T10:00:00+00:00", **more):
    versions = {"driver": "580.1", "torch": "2.11", "version": "1", "gpu": "a card", "model": "a UNet"}
    return {"when": when, **versions, **more, "rows": list(rows)}


def opened(*measurements, comparison=None, script=""):
    return run(OPEN + script, {**STATUS, "measurements": list(measurements), "comparison": comparison})


def test_a_measurement_is_drawn_by_itself_with_its_ratio():
    shown = opened(measured(row()))
    assert "The last measurement|·|milliseconds a step|512×512,|1|image|Original|31.0 ms" in shown["job"]
    assert "Stable Fast|14.8 ms|2.1×" in shown["job"] and "Last time" not in shown["job"]
    assert shown["widths"] == ["100%", "48%"] and shown["svg"] == []


def test_each_size_of_it_has_its_bars_on_one_scale():
    shown = opened(measured(row(), row("1024x1024, 1 image", 62.0, 31.0)))
    assert shown["widths"] == ["50%", "24%", "100%", "50%"]


@pytest.mark.parametrize("other", [{"model": "another"}, {"gpu": "another"}])
def test_what_is_of_another_model_or_card_is_not_next_to_it(other):
    shown = opened(measured(row(after=20.0), **other), measured(row()))
    assert "Last time" not in shown["job"] and shown["svg"] == []


def test_the_one_before_is_next_to_it_with_its_versions():
    shown = opened(measured(row(before=60.0, after=20.0), when="2026-10-01T09:00:00", driver="570.9"), measured(row()))
    # by its own original, which another driver makes another
    assert "Last time|20.0 ms|3.0×" in shown["job"]
    assert "Last time:|2026-10-01|driver|570.9|torch|2.11|Stable Fast|1" in shown["job"]
    # one that lacks a size does not count
    shown = opened(measured(row("768x768, 1 image")), measured(row()))
    assert "Last time" not in shown["job"]


def test_there_is_nothing_to_draw():
    failed = {**row(), "ms_before": None, "ms_after": None, "ready": False, "reason": "no memory"}
    for measurements in ([], [measured(failed)], [measured()]):
        shown = opened(*measurements)
        assert "The last measurement" not in shown["job"] and shown["svg"] == []


def times(*after, **more):
    return [measured(row(after=value), when=f"2026-11-{day:02}T10:00:00", **more) for day, value in enumerate(after, 1)]


def test_measurements_over_time_are_a_curve_with_axes():
    shown = opened(*times(20.0, 16.0, 14.0))
    (svg,) = shown["svg"]
    assert svg["role"] == "img" and "2026-11-01, 2026-11-03" in svg["aria-label"]
    before, after = svg["lines"]
    assert len(before) == len(after) == 3
    # time goes to the right; less is lower, and zero is the lower edge
    assert [x for x, _ in after] == sorted(x for x, _ in after) and len({y for _, y in before}) == 1
    heights = [y for _, y in after]
    assert heights == sorted(heights) and heights[-1] < 220 - 26
    assert "ms a step" in svg["texts"] and "0" in svg["texts"] and "40" in svg["texts"]
    assert {"2026-11-01", "2026-11-03"} <= set(svg["texts"]) and svg["changes"] == 0
    versions = "driver 580.1, torch 2.11, Stable Fast 1"
    assert f"2026-11-01 10:00, Stable Fast, 20.0 ms, {versions}" in svg["dots"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("driver", "590.2", "driver 590.2"), ("torch", "2.12", "torch 2.12"), ("version", "2", "Stable Fast 2")],
)
def test_another_driver_or_version_is_marked_where_it_begins(key, value, said):
    first, second, third = times(20.0, 16.0, 14.0)
    (svg,) = opened(first, {**second, key: value}, {**third, key: value})["svg"]
    assert svg["changes"] == 1 and said in svg["texts"]
    (svg,) = opened(first, {**second, key: value}, third)["svg"]
    assert svg["changes"] == 2


@pytest.mark.parametrize("count", [2, 5, 30, 100])
def test_dates_do_not_lie_over_each_other(count):
    many = [measured(row(), when=f"2026-01-{n % 28 + 1:02}T00:00:{n % 60:02}") for n in range(count)]
    script = """
        const [svg] = byTag('svg', job);
        shown.dates = byTag('text', svg).filter((each) => /^2026/.test(each.text)).map((each) => {
            const x = Number(each.attributes.x);
            const from = {start: 0, middle: 40, end: 80}[each.attributes['text-anchor']];
            return [x - from, x - from + 80];
        });
    """
    dates = opened(*many, script=script)["dates"]
    assert len(dates) >= 2 and all(end <= begin + 2 for (_, end), (begin, _) in zip(dates, dates[1:])), dates


@pytest.mark.parametrize("most", [0.4, 3.0, 31.0, 99.0, 250.0, 4321.0])
def test_every_value_is_below_the_highest_line(most):
    (svg,) = opened(*[measured(row(before=most, after=most / 2), when=f"2026-01-0{n}") for n in (1, 2)])["svg"]
    numbers = [float(text) for text in svg["texts"] if text.replace(".", "").isdigit()]
    assert 3 <= len(numbers) <= 7 and max(numbers) >= most and numbers == sorted(numbers)


def test_another_size_is_chosen():
    other = "768x768, 1 image"
    both = [measured(row(), row(other, 60.0, 30.0), when=f"2026-01-0{n}") for n in (1, 2)]
    script = """
        const [select] = byTag('select', job);
        shown.options = byTag('option', select).map((each) => each.textContent);
        select.value = byTag('option', select)[1].value;
        select.listeners.change();
        shown.then = job.textContent;
    """
    shown = opened(*both, script=script)
    assert shown["options"] == ["512×512, 1 image, a card, a UNet", "768×768, 1 image, a card, a UNet"]
    assert "Over time|·|512×512" in shown["job"] and "Over time|·|768×768" in shown["then"]


SIDE = {"width": 64, "height": 48, "seconds": 0.5, "steps": {"accelerated": 4}, "reason": None}
FOUND = {
    "accelerated": SIDE, "original": {**SIDE, "seconds": 2.0}, "times": 4.0, "mean_difference": 0.0123,
    "largest_difference": 3, "same_request": True,
}  # fmt: skip


def test_two_images_are_shown_with_their_difference_and_their_times():
    shown = opened(comparison=FOUND)
    assert "4.0×|faster|for a whole image|Mean difference of the pixels:|0.012|of 255|·|largest:|3|of 255" in (
        shown["job"]
    )
    assert "With Stable Fast|·|0.50 s" in shown["job"] and "Without Stable Fast|·|2.00 s" in shown["job"]
    assert shown["images"] == [f"./sfast/v1/comparison/{name}.png" for name in ("accelerated", "original")]


def test_what_was_not_accelerated_or_not_alike_is_said():
    said = {**FOUND, "times": 0.8, "accelerated": {**SIDE, "reason": "<b>FreeU is on"}}
    shown = opened(comparison=said)
    assert "0.8×|as fast" in shown["job"] and "Not all steps were accelerated:|<b>FreeU is on" in shown["job"]
    shown = opened(comparison={**FOUND, "same_request": False})
    assert "chosen at random" in shown["job"] and "of 255" not in shown["job"]
