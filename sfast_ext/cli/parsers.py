"""The arguments of all commands, and what `--help` says of them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sfast_ext import __version__
from sfast_ext.cli import values
from sfast_ext.tools.lib import names

PROGRAM = "python -m sfast_ext"


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where to read more."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (all arguments: {self.prog} --help)\n")


def with_negative_values(arguments: Iterable[str]) -> list[str]:
    """Arguments in which the value of an option may begin with a minus sign: argparse would call `-8x8` an option."""
    found: list[str] = []
    for word in arguments:
        if re.match(r"-[\d.,]", word) and found and re.fullmatch(r"--[a-z-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def add_stack(command: argparse.ArgumentParser) -> None:
    """The arguments for a machine with less than this one has, and for models of another attention or dtype."""
    command.add_argument(
        "--attention",
        choices=values.ATTENTIONS,
        default="sdp",
        help="The attention that the model has, in every way that is measured. Default: %(default)s.",
    )
    command.add_argument("--upcast", action="store_true", help="Attention is computed in float32.")
    command.add_argument(
        "--dtype", choices=values.DTYPES, help="The dtype of the model. Default: float16, and float32 on a CPU."
    )
    command.add_argument(
        "--without",
        action="append",
        choices=("triton",),
        default=[],
        help="Stable Fast runs as on a machine where this package is missing.",
    )
    command.add_argument(
        "--as",
        dest="capability",
        type=values.capability,
        metavar="sm_89",
        help="Stable Fast chooses its kernels as on a GPU of this compute capability, which must not be newer than that"
        " of the GPU in this machine.",
    )
    add_lossy(command)


def add_lossy(command: argparse.ArgumentParser) -> None:
    """The settings of Stable Fast that change details of an image."""
    command.add_argument(
        "--faster-sums", action="store_true", help="Stable Fast adds up in half precision on a GeForce."
    )
    command.add_argument(
        "--eight-bits",
        action="store_true",
        help="Stable Fast computes linear layers and convolutions with 8-bit integers.",
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", type=values.output_file, metavar="FILE", help="The results are written into this file as well."
    )


def _add_cases(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        type=values.unet_model,
        default="sd15",
        metavar="MODEL",
        help=f"The model: {', '.join(names.ALL)}, the path of a .safetensors checkpoint, or that of a folder that"
        " diffusers saved. Models with a name have random weights, which take the same time as trained ones. Default:"
        " %(default)s.",
    )
    command.add_argument(
        "--size",
        type=values.sizes,
        default="512x512",
        metavar="WxH[,WxH]",
        help="The sizes of the images in pixels, multiples of 8, with commas between. Default: %(default)s.",
    )
    command.add_argument(
        "--batch",
        type=values.counts,
        default="1",
        metavar="N[,N]",
        help="How many images one call makes, with commas between. Each size is measured with each number. Default:"
        " %(default)s.",
    )
    command.add_argument(
        "--tokens",
        type=values.tokens,
        default=77,
        metavar="N",
        help="How many tokens the prompt has: WebUIs make 77 of a prompt of up to 75 tokens, and 77 more of each 75"
        " further ones. Default: %(default)s.",
    )


def _add_images(command: argparse.ArgumentParser, folder: str) -> None:
    command.add_argument(
        "--model",
        type=values.image_model,
        default=os.environ.get("DEMO_MODEL") or None,
        metavar="MODEL",
        help=f"The model: {', '.join(names.TEXT_TO_IMAGE)}, the path of a .safetensors checkpoint, or that of a folder"
        f" that diffusers saved. Default: what the variable DEMO_MODEL names, otherwise sd15 with random weights on a"
        f" GPU, and on a CPU {names.DIGITS}, which was trained to write digits.",
    )
    command.add_argument(
        "--steps",
        type=values.steps,
        metavar="N",
        help="How many steps each image takes. Default: 20, and 6 on a CPU.",
    )
    command.add_argument(
        "--size",
        type=values.size,
        metavar="WxH",
        help="The size of the images in pixels, multiples of 8. Default: 512x512, and 128x128 on a CPU.",
    )
    command.add_argument(
        "--out",
        type=values.output_folder,
        default=Path(folder),
        metavar="FOLDER",
        help="The folder that sheet.png is written into. Default: %(default)s.",
    )
    _add_json(command)


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = Parser(
        prog=PROGRAM,
        description="Stable Fast for WebUI: what it does on this machine, and how fast.",
        epilog=_example("doctor", "shows what this machine has, for a bug report. Each command has its own --help."),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__, help="Print the version, and end.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)

    def add(name: str, what: str, more: str, example: str, shows: str) -> Any:
        return commands.add_parser(
            name,
            help=what,
            description=f"{what}\n{more}".strip(),
            epilog=_example(example, shows),
            formatter_class=_Paragraphs,
        )

    doctor = add(
        "doctor",
        "Show what this machine has, and what Stable Fast will use of it.",
        "",
        "doctor --json",
        "prints it for a program to read.",
    )
    doctor.add_argument("--json", action="store_true", help="Print it as JSON.")
    doctor.add_argument(
        "--eight-bits",
        action="store_true",
        help="Name every layer that stayed in half precision in the last image with 8 bits.",
    )

    demo = add(
        "demo",
        "Make images with and without Stable Fast, and compare them.",
        "LoRA, size and checkpoint change between the images. sheet.png shows images and their differences. The last"
        " line says whether they agree; the exit status is 1 if they do not.",
        "demo --model checkpoint.safetensors --size 768x512",
        "compares images of your own model.",
    )
    _add_images(demo, "demo-output")
    add_lossy(demo)
    demo.add_argument(
        "--verbose", action="store_true", help="Show the first calls, the captures and what each plan consists of, too."
    )

    bench = add(
        "bench",
        "Measure the time of one call of a UNet, with Stable Fast and in other ways.",
        "The ways are measured in turns. The exit status is 1 if Stable Fast did not accelerate the calls,"
        " or not in the way that was asked for.",
        "bench --model sdxl --size 1024x1024,832x1216 --against eager,torch-compile",
        "compares three ways at two sizes.",
    )
    _add_cases(bench)
    bench.add_argument(
        "--against",
        type=values.engines,
        default="eager,cudagraph",
        metavar="WAY[,WAY]",
        help=f"The ways to compare Stable Fast with, with commas between: {', '.join(values.ENGINES[1:])}, or sfast for"
        " Stable Fast alone. eager is PyTorch as it is. Default: %(default)s.",
    )
    bench.add_argument(
        "--iterations",
        type=values.count,
        default=30,
        metavar="N",
        help="How many calls of each way are timed. Default: %(default)s.",
    )
    bench.add_argument(
        "--cold",
        action="store_true",
        help="Each size is measured in a process that has compiled no kernel yet: shows what a first call takes.",
    )
    bench.add_argument(
        "--cudnn-benchmark", action="store_true", help="In the other ways, cuDNN chooses its algorithms by measuring."
    )
    bench.add_argument(
        "--full",
        action="store_true",
        help="Count the kernels and the floating point operations, and time the first call at a further size, too.",
    )
    add_stack(bench)
    _add_json(bench)

    quality = add(
        "quality",
        "Measure by how much images differ with Stable Fast, next to another difference.",
        "The other difference is that of images made with two attentions, neither of which is wrong. The exit status is"
        " 1 if the images differ by more than they may.",
        "quality --model checkpoint.safetensors --images 4",
        "compares four seeds of your own model.",
    )
    _add_images(quality, "quality-output")
    quality.add_argument(
        "--images",
        type=values.count,
        default=8,
        metavar="N",
        help="How many images are made in each way, of the seeds 0 to N-1. Default: %(default)s.",
    )
    quality.add_argument(
        "--prompts",
        type=values.text_file,
        metavar="FILE",
        help="A file with a prompt in each line. Default: four prompts of the project.",
    )
    quality.add_argument(
        "--yardstick",
        choices=[name for name in values.ATTENTIONS if name != "sdp"],
        default="doggettx",
        help="The attention for the other difference. Default: %(default)s.",
    )
    quality.add_argument(
        "--exact",
        action="store_true",
        help="Make the images in float32 as well, and tell which of the others are nearer to them. Needs a GPU.",
    )
    quality.add_argument(
        "--no-lossy",
        action="store_true",
        help="Leave out half-precision sums and 8 bits, which are compared as well if this machine has them.",
    )

    tune = add(
        "tune",
        "Measure on this GPU which of several kernels is fastest for each shape, and keep it.",
        "A first image measures for one second at most; this command has no limit.",
        "tune --model sdxl --size 1024x1024,832x1216",
        "measures two sizes of SDXL.",
    )
    _add_cases(tune)
    return top


class _Paragraphs(argparse.HelpFormatter):
    """Keeps the lines of an example, and fills those of a description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:"):
            return text
        return "\n".join(super(_Paragraphs, self)._fill_text(part, width, indent) for part in text.splitlines())


def _example(arguments: str, shows: str) -> str:
    return f"example:\n  {PROGRAM} {arguments}\n  {shows}"


def parsed(arguments: Sequence[str]) -> argparse.Namespace | None:
    """The arguments; None if there are none, after the help was printed."""
    top = parser()
    found = top.parse_args(with_negative_values(arguments))
    if found.command is None:
        top.print_help()
        return None
    return found
