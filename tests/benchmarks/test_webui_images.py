"""The requests of the benchmark of whole images."""

from __future__ import annotations

import argparse
import threading
import time

import pytest

pytest.importorskip("PIL")

from benchmarks.webui import eight_bits, first_image, hosts, images, several
from benchmarks.webui.images import PROMPT, numbered

SAID = {"prompt": PROMPT, "width": 512, "height": 768, "steps": 30}


def told(kind: str, number: int, another: bool) -> dict:
    return numbered(SAID, kind, number, argparse.Namespace(another_prompt=another))


def test_each_image_has_a_seed_and_if_asked_for_a_prompt():
    assert [told("txt2img", n, False)["seed"] for n in range(3)] == [0, 1, 2]
    assert {told("txt2img", n, False)["prompt"] for n in range(3)} == {PROMPT}
    assert len({told("txt2img", n, True)["prompt"] for n in range(30)}) == 30
    assert all((told("txt2img", n, True)["width"], told("txt2img", n, True)["height"]) == (512, 768) for n in range(3))


def test_sizes_of_faces_never_repeat():
    sizes = []
    for number in range(80):
        said = told("faces", number, True)
        faces = said["alwayson_scripts"]["sfast faces"]["args"][0].split(",")
        sizes += [(said["width"], said["height"]), *(tuple(map(int, face.split("x"))) for face in faces)]
    # hires fix doubles those of the images: none of them is among the others
    doubled = [(2 * width, 2 * height) for width, height in sizes[::4]]
    assert len(set(sizes + doubled)) == len(sizes + doubled) == 400
    assert all(edge % 8 == 0 and abs(edge - wanted) <= 72 for size in sizes for edge, wanted in zip(size, (512, 768)))


def test_runs_that_start_together_measure_one_after_another(tmp_path):
    order = []

    def run(number):
        with images.turn(f"{tmp_path},{number},2"):
            order.append(("begin", number))
            time.sleep(0.5)
            order.append(("end", number))

    runs = [threading.Thread(target=run, args=(number,)) for number in (1, 0)]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert order == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    with images.turn(None):
        pass


def test_caches_of_the_cases_of_the_first_image(tmp_path):
    full = tmp_path / "full"
    (full / "device").mkdir(parents=True)
    (full / "device" / "last_calls.json").write_text("[]")
    (full / "triton").mkdir()
    (full / "triton" / "kernel").write_text("")
    found = {}
    for case in first_image.CASES:
        copied = first_image.copied(case, full, tmp_path / "cases" / case)
        found[case] = sorted(file.name for file in copied.rglob("*") if file.is_file())
    both = ["kernel", "last_calls.json"]
    assert found == {"stock": [], "full": both, "empty": ["last_calls.json"], "off": both}


def test_each_way_has_the_extension_that_it_measures():
    off = {way: hosts.disabled(way)["disabled_extensions"] for way in hosts.WAYS}
    assert off.pop("stock") == [hosts.EXTENSION, hosts.EARLIER]
    assert off.pop("earlier") == [hosts.EXTENSION]
    assert set(map(tuple, off.values())) == {(hosts.EARLIER,)}


def test_an_earlier_state_is_a_case_of_today_s_flags():
    cases = eight_bits.cases_of("a1111", [8], earlier=True)
    assert cases[-1] == eight_bits.Case(8, "earlier", f"--medvram-sdxl {eight_bits.SDP}")
    larger, today, eight, earlier = cases
    rows: dict = {larger: {}, today: {"image_s": 2.0}, eight: {"image_s": 1.5}, earlier: {"image_s": 3.0}}
    assert "image 0.75 of today's; 0.50 of the earlier state's" in eight_bits.words(eight, rows)
    assert "earlier" not in eight_bits.words(earlier, rows).partition(": ")[2]


def test_words_of_cases_in_8_bits():
    larger, today, eight = eight_bits.cases_of("a1111", [6])
    both = f"--medvram {eight_bits.SDP}"
    assert (today.flags, eight.flags, eight.way) == (both, both, "eight")
    memory = [{"bytes": 5 << 30, "unet": 3 << 30}]
    rows = {
        larger: {"step_ms": 25.0, "image_s": 1.0},
        today: {"step_ms": 110.0, "image_s": 4.0, "first_s": 7.0, "memory": memory},
        eight: {"step_ms": 30.0, "image_s": 2.0, "first_s": 9.0, "memory": memory},
    }
    said = eight_bits.words(eight, rows)
    assert "step 1.20 of 12 GB" in said and "image 0.50 of today's" in said and "reserved 5120 MB" in said
    rows[today] = {"failed": "out of memory"}
    assert "of today's" not in eight_bits.words(eight, rows)
    row: dict = {"images_s": [9.0, 5.0, 2.0, 2.2, 2.1], "longer_s": [2.6, 2.5, 2.7]}

    class Gone:
        def get(self, _):
            raise OSError

    eight_bits.end(Gone(), row, argparse.Namespace(steps=20, brief=False))
    assert (row["first_s"], row["image_s"], row["step_ms"]) == (9.0, 2.1, 50.0)
    # those that are not timed were made at once
    brief: dict = {"images_s": [9.0, 5.0, 2.0, 2.2, 2.1]}
    eight_bits.end(Gone(), brief, argparse.Namespace(steps=20, brief=True))
    assert brief["image_s"] == 2.1 and "first_s" not in brief
    cards = {each.card for each in eight_bits.cases_of("a1111", [6], larger=False)}
    assert cards == {6} and "image 2.1 s" in eight_bits.words(today, {today: brief})


def test_images_of_two_webuis_are_compared_seed_by_seed():
    import json

    from hosts.live.webui import encoded
    from PIL import Image

    def answer(shades: dict[int, int]) -> dict:
        images = [encoded(Image.new("RGB", (8, 8), (shade,) * 3)) for shade in shades.values()]
        texts = [f"a dog\nSteps: 2, Seed: {seed}, Size: 8x8" for seed in shades]
        return {"images": images, "info": json.dumps({"infotexts": texts})}

    first = answer({5: 10, 6: 200})
    assert several.apart(first, answer({6: 200, 5: 10})) == 0.0
    assert several.apart(first, answer({6: 197, 5: 10})) == 3.0
    with pytest.raises(AssertionError):
        several.apart(first, answer({5: 10, 7: 200}))


def test_half_written_files_of_a_cache_are_told(tmp_path):
    (tmp_path / "triton").mkdir()
    for name in ("a.cubin", "b.cubin", ".turn", "triton/c.cubin", ".a.cubin.12", "times.json"):
        (tmp_path / name).touch()
    assert several.kept(tmp_path) == {"kernels": 3, "half_written": [".a.cubin.12"]}


def test_every_request_to_two_webuis_is_another():
    options = argparse.Namespace(size=(512, 512), tiny=False)
    made = list(several.steps({"prompt": "a ship", "width": 512, "height": 512}, options))
    assert len({name for name, _ in made}) == len({said["seed"] for _, said in made}) == len(made)
    assert sum("lora" in said["prompt"] for _, said in made) == 2 and sum(said["width"] == 640 for _, said in made) == 3
