"""PNG files that several threads compress, beside Pillow's."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from png_parts import beside, chunks, stream

from sfast_ext import parallel_png

PILLOWS = PngImagePlugin._save
SIZES = ((1, 1), (1, 300), (300, 1), (7, 5), (64, 64), (200, 333), (5, 40000))
LEVELS = ({}, {"compress_level": 6}, {"compress_level": 0}, {"compress_level": 9, "compress_type": zlib.Z_HUFFMAN_ONLY})


def noise(size, channels):
    return np.random.default_rng(sum(size)).integers(0, 256, (*size, channels), dtype=np.uint8)


def photograph(size, channels):
    """Smooth, with edges, and repetitions of more than a band apart."""
    y, x = np.mgrid[: size[0], : size[1]]
    waves = [128 + 90 * np.sin(x / (3 + c) + c) * np.cos(y / 11) + 30 * (x % 97 > 40) for c in range(channels)]
    return np.clip(np.stack(waves, axis=-1) + noise(size, channels) % 5, 0, 255).astype(np.uint8)


def flat(size, channels):
    return np.full((*size, channels), 7, np.uint8)


def extremes(size, channels):
    """Differences of 127, 128 and 255, where signed and unsigned part."""
    return np.random.default_rng(1).choice(np.array([0, 1, 127, 128, 129, 255], np.uint8), (*size, channels))


def image(pixels):
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def saved(im, **options):
    file = io.BytesIO()
    im.save(file, "PNG", **options)
    return file.getvalue()


@pytest.fixture
def ours(monkeypatch):
    """Installed, for images of any size, with several bands each; a list of the images that it compressed."""
    monkeypatch.setattr(parallel_png, "MIN_BYTES", 0)
    monkeypatch.setattr(parallel_png, "_MIN_BAND", 1000)
    monkeypatch.setattr(parallel_png, "_BAND", 30000)
    done, packed = [], parallel_png._packed

    def noting(im):
        done.append(im.mode)
        return packed(im)

    monkeypatch.setattr(parallel_png, "_packed", noting)
    remove = parallel_png.install(lambda: True)
    done.clear()
    assert Image.SAVE["PNG"] is not PILLOWS
    yield done
    remove()
    assert Image.SAVE["PNG"] is PILLOWS


def pillows(im, **options):
    # Image.save keeps the options of the file before
    file, im = io.BytesIO(), im.copy()
    im.encoderinfo = options
    PILLOWS(im, file, "")
    return file.getvalue()


@pytest.mark.thinned
@pytest.mark.parametrize("options", LEVELS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of", [noise, photograph, flat, extremes])
def test_the_same_rows_and_filters_as_pillow(ours, of, size, channels, options):
    pixels = of(size, channels)
    file = saved(image(pixels), **options)
    assert len(ours) == 1
    assert all(len(data) > 4 for name, data in chunks(file) if name == b"IDAT")
    assert stream(file) == stream(pillows(image(pixels), **options))
    read = Image.open(io.BytesIO(file))
    assert np.array_equal(np.asarray(read).reshape(pixels.shape), pixels)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("band", [1, 5000, 1 << 19])
def test_any_number_of_bands(ours, monkeypatch, threads, band):
    monkeypatch.setattr(parallel_png, "_threads", lambda size: threads)
    monkeypatch.setattr(parallel_png, "_BAND", band)
    im = image(photograph((90, 400), 3))
    assert stream(saved(im)) == stream(pillows(im)) and ours


@pytest.mark.parametrize(
    ("cores", "size", "threads"), [(16, 512, 4), (16, 1024, 8), (6, 1024, 6), (1, 2048, 1), (4, 300, 1)]
)
def test_as_many_threads_as_cores_and_no_more_than_pay(monkeypatch, cores, size, threads):
    monkeypatch.setattr(parallel_png.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert parallel_png._threads(3 * size * size) == threads
    # Windows and macOS
    monkeypatch.delattr(parallel_png.os, "sched_getaffinity")
    monkeypatch.setattr(parallel_png.os, "cpu_count", lambda: cores)
    assert parallel_png._threads(3 * size * size) == threads


def test_a_file_is_as_large_as_pillows(ours, monkeypatch):
    monkeypatch.setattr(parallel_png, "_MIN_BAND", 1 << 16)
    for of in (noise, photograph):
        im = image(of((512, 512), 3))
        assert len(saved(im)) < 1.01 * len(pillows(im))
    # each row of noise again 30 rows later: 23 KB, in the band before
    im = image(np.tile(noise((30, 256), 3), (20, 1, 1)))
    assert len(saved(im)) < 1.3 * len(pillows(im))


@pytest.mark.parametrize("seed", range(20))
def test_each_row_has_the_filter_of_the_least_differences(seed):
    rng = np.random.default_rng(seed)
    pixel = int(rng.integers(1, 5))
    rows = (rng.integers(0, 256, (6, pixel * 9)) // rng.choice([1, 64])).astype(np.uint8)
    above = rng.integers(0, 256, pixel * 9).astype(np.uint8)
    found = parallel_png.filtered(rows, above, pixel)
    for row, up, out in zip(rows.tolist(), [above.tolist(), *rows.tolist()], found.tolist()):
        ways = {kind: by_the_specification(kind, row, up, pixel) for kind in (0, 2, 1, 4)}
        assert out[1:] == ways[out[0]]
        costs = {kind: sum(min(v, 256 - v) for v in way) for kind, way in ways.items()}
        assert out[0] == min(costs, key=lambda kind: costs[kind])


def by_the_specification(kind, row, up, pixel):
    """PNG (Third Edition), section 9."""
    out = []
    for at, x in enumerate(row):
        a, c = (row[at - pixel], up[at - pixel]) if at >= pixel else (0, 0)
        b = up[at]
        estimate = a + b - c
        paeth = min((a, b, c), key=lambda each: abs(estimate - each))
        out.append((x - {0: 0, 1: a, 2: b, 4: paeth}[kind]) % 256)
    return out


def test_all_but_the_pixels_is_pillows(ours):
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a cat\nSteps: 20, Sampler: Euler a")
    info.add_itxt("prompt", "Grüße, 猫", "de")
    info.add_text("long", "x" * 5000, zip=True)
    info.add(b"prVt", b"before the pixels")
    info.add(b"prVu", b"behind them", after_idat=True)
    info.add(b"gAMA", struct.pack(">I", 45455))
    exif = Image.Exif()
    exif[0x9286] = "a comment"
    options = {"pnginfo": info, "dpi": (300, 300), "exif": exif, "icc_profile": b"a profile", "quality": 80}
    for im in (image(photograph((40, 50), 3)), image(photograph((40, 50), 4))):
        file = saved(im, **options)
        assert beside(file) == beside(pillows(im, **options))
        read = Image.open(io.BytesIO(file))
        read.load()
        assert read.text["parameters"].startswith("a cat") and read.text["prompt"] == "Grüße, 猫"
    rgb = image(photograph((40, 50), 3))
    assert beside(saved(rgb, transparency=(1, 2, 3))) == beside(pillows(rgb, transparency=(1, 2, 3)))
    rgb.info.update(icc_profile=b"its own", transparency=(4, 5, 6))
    assert beside(saved(rgb)) == beside(pillows(rgb))
    assert len(ours) == 4


def test_a_file_on_disk_and_an_image_that_was_not_read_yet(ours, tmp_path):
    im = image(photograph((40, 50), 3))
    im.save(tmp_path / "a.png")
    Image.open(tmp_path / "a.png").save(tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert len(ours) == 2


def test_what_is_pillows(ours, monkeypatch):
    rgb = image(photograph((40, 50), 3))
    for im in (rgb.convert("P"), rgb.convert("1"), rgb.convert("LA"), Image.new("I;16", (40, 50), 300)):
        assert saved(im) == pillows(im)
    gray = rgb.convert("L")
    assert saved(gray, bits=4) == pillows(gray, bits=4)
    for options in ({"optimize": True}, {"dictionary": bytes(100)}):
        assert saved(rgb, **options) == pillows(rgb, **options)
    assert Image.open(io.BytesIO(saved(rgb, save_all=True, append_images=[rgb.rotate(90)]))).n_frames == 2
    assert not ours
    monkeypatch.setattr(parallel_png, "MIN_BYTES", 40 * 50 * 3 + 1)
    assert saved(rgb) == pillows(rgb) and not ours
    monkeypatch.setattr(parallel_png, "MIN_BYTES", 40 * 50 * 3)
    assert saved(rgb) and ours


def test_the_users_choice_holds_for_the_next_file(monkeypatch):
    monkeypatch.setattr(parallel_png, "MIN_BYTES", 0)
    answers = [True, False, True]
    remove = parallel_png.install(lambda: answers.pop(0))
    im = image(photograph((400, 50), 3))
    monkeypatch.setattr(parallel_png, "_MIN_BAND", 1000)
    several = [sum(name == b"IDAT" for name, _ in chunks(saved(im))) > 1 for _ in range(3)]
    remove()
    assert several == [True, False, True] and not answers


@pytest.mark.parametrize("where", ["wanted", "compressed"])
def test_an_exception_loses_no_image(monkeypatch, where):
    def fail(*args):
        raise RuntimeError("no more threads")

    monkeypatch.setattr(parallel_png, "MIN_BYTES", 0)
    remove = parallel_png.install(fail if where == "wanted" else lambda: True)
    if where == "compressed":
        monkeypatch.setattr(parallel_png, "compressed", fail)
    im = image(photograph((40, 50), 3))
    try:
        assert saved(im) == pillows(im)
    finally:
        remove()


def test_a_full_disk_raises_as_ever(ours):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() + len(data) > 1000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    with pytest.raises(OSError, match="No space left"):
        image(noise((40, 50), 3)).save(Full(), "PNG")


def test_another_writer_is_left_alone():
    def another(im, fp, filename, chunk=PngImagePlugin.putchunk):
        PILLOWS(im, fp, filename, chunk=chunk)
        fp.write(b"another's")

    Image.register_save("PNG", another)
    try:
        remove = parallel_png.install(lambda: True)
        assert Image.SAVE["PNG"] is another
        remove()
        assert Image.SAVE["PNG"] is another
    finally:
        Image.register_save("PNG", PILLOWS)


def test_a_writer_over_ours_stays_when_ours_goes(monkeypatch):
    monkeypatch.setattr(parallel_png, "MIN_BYTES", 0)
    remove = parallel_png.install(lambda: True)
    inner = Image.SAVE["PNG"]

    def over(im, fp, filename):
        inner(im, fp, filename)

    Image.register_save("PNG", over)
    im = image(photograph((400, 80), 3))
    try:
        assert saved(im) != pillows(im)
        remove()
        assert Image.SAVE["PNG"] is over and saved(im) == pillows(im)
    finally:
        Image.register_save("PNG", PILLOWS)


@pytest.mark.parametrize("broken", ["pixels", "text", "raises"])
def test_a_pillow_that_does_it_otherwise_keeps_its_writer(monkeypatch, broken):
    def save(im, fp, filename, chunk=PngImagePlugin.putchunk, save_all=False):
        if broken == "raises" and chunk is not PngImagePlugin.putchunk:
            raise TypeError("chunk")
        if broken == "text" and chunk is not PngImagePlugin.putchunk:
            im.encoderinfo = {}
        PILLOWS(im, fp, filename, chunk=chunk)

    monkeypatch.setattr(PngImagePlugin, "_save", save)
    monkeypatch.setitem(Image.SAVE, "PNG", save)
    if broken == "pixels":
        right = parallel_png._paeth
        monkeypatch.setattr(parallel_png, "_paeth", lambda a, b, c: right(a, b, c) ^ 1)
    parallel_png.install(lambda: True)
    assert Image.SAVE["PNG"] is save


def test_several_images_at_once(ours):
    images = [image(photograph((60 + n, 80), 3)) for n in range(8)]
    expected = [stream(pillows(im)) for im in images]
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(saved, images))
    assert [stream(file) for file in files] == expected and len(ours) == 8


def test_no_thread_stays(ours):
    before = threading.active_count()
    saved(image(photograph((60, 80), 3)))
    assert ours and threading.active_count() == before


def test_an_image_that_is_saved_while_python_ends(tmp_path):
    program = """
        import atexit, sys
        import numpy as np
        from PIL import Image
        from sfast_ext import parallel_png
        parallel_png.install(lambda: True)
        im = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8))
        atexit.register(lambda: im.save(sys.argv[1]))
    """
    file = tmp_path / "last.png"
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), file], cwd=root, check=True, timeout=120)
    expected = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(file)), expected)
