"""What is typed wrongly: one line that says how to write it, and status 2, before anything is loaded or measured."""

from __future__ import annotations

import json
import os
import re
import struct

import pytest

from sfast_ext import cli
from sfast_ext.cli import parsers, values
from sfast_ext.tools import bench, demo, quality, tune
from sfast_ext.tools.lib import Unavailable, models, names, weight_files

WHOLE = "must be a whole number from "
SIZE = "must be WIDTHxHEIGHT in pixels, e.g. 512x512"
MULTIPLES = "width and height must be multiples of 8, e.g. "
LIMITS = "width and height must be 64 to 8192 pixels, e.g. "
NO_MODEL = "There are sd15, sd15-inpaint, sd21, sdxl, sdxl-refiner, tiny-sd15, "
COMMANDS = ("demo", "bench", "quality", "tune")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that arguments are refused with."""
    try:
        status = cli.main(arguments)
    except SystemExit as exc:
        status = exc.code
    said = capsys.readouterr()
    assert status == 2, said
    line = said.err.strip()
    assert "\n" not in line and "Traceback" not in line and not said.out
    assert line.startswith("python -m sfast_ext") and ": error: " in line
    return line


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEMO_MODEL", raising=False)
    for tool in (bench, demo, quality, tune):
        monkeypatch.setattr(tool, "main", lambda options: pytest.fail("it was run"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("512", SIZE),
        ("512,512", SIZE),
        ("512x", SIZE),
        ("x512", SIZE),
        ("512x512x512", SIZE),
        ("512.0x512", SIZE),
        ("1e3x512", SIZE),
        ("wide", SIZE),
        ("٥١٢x512", SIZE),
        ("9" * 5000 + "x512", SIZE),
        ("500x500", MULTIPLES + "496x496 or 504x504"),
        ("500×512", MULTIPLES + "496x512 or 504x512"),
        ("513x770", MULTIPLES + "512x768 or 520x776"),
        ("65x64", MULTIPLES + "64x64 or 72x64"),
        ("0x0", LIMITS + "64x64"),
        ("0x512", LIMITS + "64x512"),
        ("-512x512", LIMITS + "64x512"),
        ("512x-8", LIMITS + "512x64"),
        ("8x8", LIMITS + "64x64"),
        ("99999x99999", LIMITS + "8192x8192"),
        ("", "'' "),
        (",", "','"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_sizes(command, text, said, capsys):
    line = refused([command, "--size", text], capsys)
    assert "--size" in line and (said in line or (command in ("bench", "tune") and "names no size" in line))


@pytest.mark.parametrize("text", ["512x512", "512X512", "512×512", "512*512", " 512 x 512 ", "+512x512"])
def test_sizes_as_people_write_them(text):
    assert values.size(text) == (512, 512)
    assert values.sizes(f"{text},768x64,") == [(512, 512), (768, 64)]


def test_lists():
    assert cli.counts("1,4") == [1, 4]
    assert cli.engines("eager,cudagraph,eager") == ["sfast", "eager", "cudagraph"]
    assert cli.engines("sfast") == ["sfast"]


NUMBERS = [
    ("bench", "--batch"),
    ("bench", "--iterations"),
    ("bench", "--tokens"),
    ("tune", "--batch"),
    ("tune", "--tokens"),
    ("demo", "--steps"),
    ("quality", "--steps"),
    ("quality", "--images"),
]


@pytest.mark.parametrize(
    "text", ["0", "-1", "-3", "-5", "1.5", "-1.5", "abc", "1e3", "nan", "٣", "9" * 5000, "1 2", "0x8"]
)
@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_numbers(command, option, text, capsys):
    line = refused([command, option, text], capsys)
    assert f"argument {option}: {text!r} {WHOLE}1 to " in line and ", e.g. " in line
    # no function's name
    assert not re.search(r"invalid \w+ value", line)


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_empty_numbers(command, option, capsys):
    line = refused([command, option, ""], capsys)
    assert WHOLE in line or "names no number" in line


def test_numbers_as_they_should_be():
    args = cli.parser().parse_args(["bench", "--batch", "1,2", "--iterations", "3", "--tokens", "154"])
    assert (args.batch, args.iterations, args.tokens) == ([1, 2], 3, 154)
    assert cli.parser().parse_args(["demo", "--steps", "1"]).steps == 1
    assert refused_steps("1001") and refused_steps("99999999")


def refused_steps(text: str) -> bool:
    with pytest.raises(values.ArgumentTypeError, match="from 1 to 1000"):
        values.steps(text)
    return True


def test_defaults_are_read_as_if_they_were_typed():
    args = cli.parser().parse_args(["bench"])
    assert (args.size, args.batch, args.against) == ([(512, 512)], [1], ["sfast", "eager", "cudagraph"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dance"], "'dance'"),
        (["doctor", "extra"], "extra"),
        (["bench", "--nonsense"], "--nonsense"),
        (["bench", "--against", ""], "names no engine: write e.g. eager,cudagraph; sfast alone"),
        (["bench", "--against", ","], "names no engine"),
        (["bench", "--against", "tensorrt"], "no engine is called 'tensorrt'. There are sfast, eager"),
        (["bench", "--against", "eagre"], "Did you mean eager?"),
        (["bench", "--attention", "foo"], "sliced"),
        (["bench", "--dtype", "int8"], "bfloat16"),
        (["bench", "--as", "banana"], "'banana' is no compute capability, e.g. sm_89"),
        (["bench", "--as", "sm_9"], "sm_89"),
        (["bench", "--as", "-1"], "sm_89"),
        (["bench", "--without", "cuda"], "triton"),
        (["quality", "--yardstick", "sdp"], "doggettx"),
        (["quality", "--prompts", "/nowhere/none.txt"], "'/nowhere/none.txt' cannot be read: No such file"),
        (["quality", "--prompts", ""], "cannot be read"),
        (["quality", "--prompts", "."], "cannot be read"),
        (["bench", "--size"], "--size: expected one argument"),
    ],
)
def test_other_words(arguments, said, capsys):
    line = refused(arguments, capsys)
    assert said in line and "--help" in line


def test_without_a_command_all_are_shown(capsys):
    assert cli.main([]) == 2
    told = capsys.readouterr().out
    assert all(f"    {name} " in told for name in (*COMMANDS, "doctor")) and "example:" in told


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize("model", ["nosuch", "sd1.5", "SD 1.5", "sdxl2", "flux3", "", " ", "tiny", "nul\0l"])
def test_models_without_that_name(command, model, capsys):
    line = refused([command, "--model", model], capsys)
    assert NO_MODEL in line and ("no file or folder" in line or "names no model" in line)


@pytest.mark.parametrize(
    ("near", "meant"), [("sd1.5", "sd15"), ("SDXL", "sdxl"), ("sdx", "sdxl"), ("tinysd15", "tiny-sd15")]
)
def test_the_name_that_was_meant(near, meant, capsys):
    assert f"Did you mean {meant}?" in refused(["bench", "--model", near], capsys)


@pytest.mark.parametrize("command", ["demo", "quality"])
@pytest.mark.parametrize("model", ["nosuch", "sd15-inpaint", "sdxl-refiner", "tiny-sdxl-refiner", "", "sd1.5"])
def test_models_that_make_no_images(command, model, capsys):
    line = refused([command, "--model", model], capsys)
    assert "sd15, sd21, sdxl, tiny-sd15, tiny-sd21, tiny-sdxl, tiny-digits" in line


def test_the_model_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("DEMO_MODEL", "/nowhere/model.safetensors")
    assert "there is no file or folder /nowhere/model.safetensors" in refused(["demo"], capsys)
    monkeypatch.setenv("DEMO_MODEL", "")
    assert cli.parser().parse_args(["demo"]).model is None


def test_all_commands_take_the_same_names():
    assert tuple(models.CONFIGURATIONS) == models.NAMES and set(names.TEXT_TO_IMAGE) < set(names.ALL)
    for name in names.ALL:
        assert values.unet_model(name) == name
    for name in names.TEXT_TO_IMAGE:
        assert values.image_model(name) == name


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
WHOLE_FILE = struct.pack("<Q", len(HEADER)) + HEADER + bytes(16)
FILES = {
    "empty": b"",
    "text": b"this is no model, but a page that says 404\n" * 9,
    "random": bytes(range(256)) * 20,
    "cut in the header": WHOLE_FILE[:20],
    "cut in the weights": WHOLE_FILE[:-4],
    "zeros": bytes(100),
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4265146304\n",
    "one byte": b"\x01",
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_files_of_weights(command, kind, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    file.write_bytes(FILES[kind])
    line = refused([command, "--model", str(file)], capsys)
    # a file of zeros is a header of no bytes
    assert str(file) in line and ("download it again" in line)


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_are_no_weights(command, tmp_path, capsys):
    for name in ("model.ckpt", "model.pt", "model.txt", "model"):
        (tmp_path / name).write_bytes(b"x")
        line = refused([command, "--model", str(tmp_path / name)], capsys)
        assert "is neither a folder nor a .safetensors file: convert it to .safetensors first" in line
    assert "there is no file or folder /none.safetensors" in refused([command, "--model", "/none.safetensors"], capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_that_are_no_models(command, tmp_path, capsys):
    empty = tmp_path / "x.safetensors"
    empty.mkdir()
    assert "has no model_index.json" in refused([command, "--model", str(empty)], capsys)
    (empty / "model_index.json").write_text("{")
    assert "cannot be read" in refused([command, "--model", str(empty)], capsys)
    (empty / "model_index.json").write_text("{}")
    (empty / "unet").mkdir()
    (empty / "unet" / "weights.safetensors").write_bytes(WHOLE_FILE[:-4])
    assert "weights.safetensors is damaged" in refused([command, "--model", str(empty)], capsys)


def test_a_whole_file_and_a_folder_of_a_unet_are_taken(tmp_path, capsys):
    file = tmp_path / "model.SAFETENSORS"
    file.write_bytes(WHOLE_FILE)
    assert values.unet_model(str(file)) == values.image_model(str(file)) == str(file)
    (tmp_path / "config.json").write_text("{}")
    assert values.unet_model(str(tmp_path)) == str(tmp_path)
    assert "has no model_index.json" in refused(["demo", "--model", str(tmp_path)], capsys)


def test_a_prompt_file_of_another_encoding(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(b"\xb9\xff\x00")
    line = refused(["quality", "--prompts", str(tmp_path / "prompts.txt")], capsys)
    assert "prompts.txt is no text in UTF-8" in line


@pytest.mark.parametrize("command", ["demo", "bench", "quality"])
def test_results_that_cannot_be_written(command, tmp_path, capsys):
    assert "is a folder: name a file in it, e.g." in refused([command, "--json", str(tmp_path)], capsys)
    assert "is a folder" in refused([command, "--json", f"{tmp_path}/new/"], capsys)
    assert "is empty" in refused([command, "--json", ""], capsys)
    (tmp_path / "file").write_text("")
    assert "nothing can be written into" in refused([command, "--json", f"{tmp_path}/file/x.json"], capsys)
    assert "nothing can be written into" in refused([command, "--json", "/proc/x.json"], capsys)


@pytest.mark.parametrize("command", ["demo", "quality"])
def test_folders_that_cannot_be_made(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "is a file: name a folder" in refused([command, "--out", str(tmp_path / "file")], capsys)
    assert "nothing can be written into" in refused([command, "--out", str(tmp_path / "file" / "below")], capsys)
    assert "nothing can be written into" in refused([command, "--out", "/proc/nowhere"], capsys)
    assert "is empty" in refused([command, "--out", ""], capsys)


@pytest.mark.skipif(
    os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_folder_without_permission(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert "nothing can be written into" in refused(["demo", "--out", str(tmp_path / "new")], capsys)


def test_folders_are_there_before_anything_is_measured(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "main", lambda options: seen.append(options.json.parent.is_dir()) or 0)
    monkeypatch.setattr(demo, "main", lambda options: seen.append(options.out.is_dir()) or 0)
    assert cli.main(["bench", "--json", str(tmp_path / "a" / "b" / "x.json")]) == 0
    assert cli.main(["demo", "--out", str(tmp_path / "c" / "d")]) == 0
    assert seen == [True, True] and not list((tmp_path / "c" / "d").iterdir())


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (Unavailable("there is no\nsuch thing"), 2, "there is no such thing"),
        (MemoryError(), 2, "out of memory (MemoryError): name a smaller --size"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), 2, "out of memory (CUDA out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, "out of memory"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "has no peft. Install"),
        (ImportError("cannot import name 'x' from 'y'"), 2, "a package cannot be imported (cannot import name"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_what_ends_a_command(raised, status, said, monkeypatch, capsys):
    def ends(options):
        raise raised

    monkeypatch.setattr(bench, "main", ends)
    assert cli.main(["bench", "--model", "tiny-sd15"]) == status
    told = capsys.readouterr().err.strip()
    assert said in told and "\n" not in told


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    def ends(options):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(bench, "main", ends)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["bench"])


def test_help_says_what_each_argument_does(capsys):
    for command in (*COMMANDS, "doctor"):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        told = capsys.readouterr().out
        assert stop.value.code == 0 and "example:\n  python -m sfast_ext " + command in told
        assert not re.search(r"\bours\b|passes for|…", told)
    top = parsers.parser()
    (commands,) = (action.choices for action in top._actions if hasattr(action, "choices") and action.choices)
    for name, command in commands.items():
        for action in command._actions:
            if action.dest != "help":
                assert re.match(r"[A-Z]|\w+ [a-z]", action.help) and action.help.rstrip().endswith("."), (
                    name,
                    action.dest,
                )


def test_the_first_line_of_an_exception():
    assert weight_files.first_line(ValueError("one\ntwo")) == "one"
    assert weight_files.first_line(ValueError()) == "ValueError"
