"""The command line: doctor, demo, bench, quality, tune. What they do is in `tools`, imported when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sfast_ext import __version__

ENGINES = ("sfast", "eager", "eager-channels-last", "cudagraph", "torch-compile")
ATTENTIONS = ("sdp", "plain", "sliced", "xformers", "doggettx", "v1", "invokeai", "subquad")
DTYPES = ("float16", "bfloat16", "float32")


def size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels, both multiples of 8."""
    try:
        width, height = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, e.g. 512x512") from None
    if width < 8 or height < 8 or width % 8 or height % 8:
        raise argparse.ArgumentTypeError(f"{text}: width and height are multiples of 8")
    return width, height


def sizes(text: str) -> list[tuple[int, int]]:
    """Sizes with commas between."""
    return [size(part) for part in text.split(",") if part]


def counts(text: str) -> list[int]:
    """Positive integers with commas between."""
    found = [int(part) for part in text.split(",") if part]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 or more")
    return found


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 or more")
    return int(text)


def engines(text: str) -> list[str]:
    """Names of engines with commas between; ours is always measured and stands first."""
    found = [part for part in text.split(",") if part]
    for name in found:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"no engine is called {name!r}; there are {', '.join(ENGINES)}")
    return ["sfast", *(name for name in dict.fromkeys(found) if name != "sfast")]


def capability(text: str) -> tuple[int, int]:
    """A compute capability as compilers name it: sm_89 is 8.9."""
    digits = text.lower().removeprefix("sm_")
    if not digits.isdecimal() or len(digits) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability, e.g. sm_89")
    return int(digits[:-1]), int(digits[-1])


def add_lossy(command: argparse.ArgumentParser) -> None:
    """What changes details of an image, as the settings of the same names."""
    command.add_argument("--faster-sums", action="store_true", help="add up in half precision on a GeForce")
    command.add_argument("--eight-bits", action="store_true", help="compute linear layers in 8 bits")


def add_stack(bench: argparse.ArgumentParser) -> None:
    """The arguments that take away from what ours has, or give the model another attention or dtype."""
    bench.add_argument("--attention", choices=ATTENTIONS, default="sdp", help="of the model (%(default)s)")
    bench.add_argument("--upcast", action="store_true", help="compute attention in fp32")
    bench.add_argument("--dtype", choices=DTYPES, help="of the model (default: float16; on a CPU float32)")
    bench.add_argument("--without", action="append", choices=("triton",), default=[], help="what ours is not to use")
    bench.add_argument(
        "--as",
        dest="capability",
        type=capability,
        metavar="sm_89",
        help="the compute capability that the GPU passes for when ours chooses kernels",
    )
    add_lossy(bench)


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = argparse.ArgumentParser(prog="python -m sfast_ext", description="Stable Fast for WebUI")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="what this machine has, and what will therefore be used")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument(
        "--eight-bits", action="store_true", help="name every layer that stays in half precision with 8 bits"
    )

    demo = commands.add_parser("demo", help="images with and without the accelerator, compared")
    demo.add_argument(
        "--model",
        default=os.environ.get("DEMO_MODEL") or None,
        help="a .safetensors checkpoint or a folder of diffusers (default: $DEMO_MODEL, or the project's)",
    )
    demo.add_argument("--out", type=Path, default=Path("demo-output"), help="where the images go (%(default)s)")
    demo.add_argument("--steps", type=int, help="steps of each image (default: 6 on a CPU, 20 on a GPU)")
    demo.add_argument("--size", type=size, help="of the images (default: 128x128 on a CPU, 512x512 on a GPU)")
    add_lossy(demo)
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")

    bench = commands.add_parser("bench", help="time of one UNet call, against other ways to run it")
    bench.add_argument("--model", default="sd15", help="sd15, sdxl, …, tiny-sd15, or a path (%(default)s)")
    bench.add_argument("--size", type=sizes, default="512x512", metavar="WxH,…", help="of the images (%(default)s)")
    bench.add_argument("--batch", type=counts, default="1", metavar="N,…", help="images at once (%(default)s)")
    bench.add_argument(
        "--against", type=engines, default="eager,cudagraph", help=f"of {', '.join(ENGINES)} (%(default)s)"
    )
    bench.add_argument("--iterations", type=int, default=30, help="timed calls of each engine (%(default)s)")
    bench.add_argument("--tokens", type=int, default=77, help="of the prompt (%(default)s)")
    bench.add_argument("--cold", action="store_true", help="its own process and empty caches for each size")
    bench.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN choose its algorithms by measuring")
    bench.add_argument("--full", action="store_true", help="also kernels launched, FLOPs, a further size")
    add_stack(bench)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")

    quality = commands.add_parser("quality", help="by how much images differ with it, next to a yardstick")
    quality.add_argument(
        "--model",
        default=os.environ.get("DEMO_MODEL") or None,
        help="a .safetensors checkpoint or a folder of diffusers (default: $DEMO_MODEL, or the project's)",
    )
    quality.add_argument("--pictures", type=count, default=8, metavar="N", help="seeds 0 to N-1 (%(default)s)")
    quality.add_argument("--steps", type=count, help="steps of each image (default: 6 on a CPU, 20 on a GPU)")
    quality.add_argument("--size", type=size, help="of the images (default: 128x128 on a CPU, 512x512 on a GPU)")
    quality.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt in each line (default: four)")
    quality.add_argument(
        "--yardstick",
        choices=[name for name in ATTENTIONS if name != "sdp"],
        default="doggettx",
        help="the attention with which the original is compared with itself (%(default)s)",
    )
    quality.add_argument(
        "--exact",
        action="store_true",
        help="also the images in float32 (float64 on a CPU), and who is nearer to them",
    )
    quality.add_argument(
        "--no-lossy",
        action="store_true",
        help="leave out half-precision sums and 8 bits, which are compared as well if this machine has them",
    )
    quality.add_argument("--out", type=Path, default=Path("quality-output"), help="where sheet.png goes (%(default)s)")
    quality.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")

    tune = commands.add_parser("tune", help="measure on this GPU which of several ways runs each shape fastest")
    tune.add_argument("--model", default="sd15", help="sd15, sdxl, …, or a path (%(default)s)")
    tune.add_argument("--size", type=sizes, default="512x512", metavar="WxH,…", help="of the images (%(default)s)")
    tune.add_argument("--batch", type=counts, default="1", metavar="N,…", help="images at once (%(default)s)")
    tune.add_argument("--tokens", type=int, default=77, help="of the prompt (%(default)s)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # into a file or a pipe, Windows writes in a code page that has not every character
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    args = parser().parse_args(arguments)
    if args.command == "doctor":
        from sfast_ext.tools import doctor

        return doctor.main(args.json, args.eight_bits)
    if args.command == "demo":
        from sfast_ext.tools import demo

        lossy = args.faster_sums, args.eight_bits
        return demo.main(demo.Options(args.model, args.out, args.steps, args.size, args.json, *lossy))
    if args.command == "quality":
        from sfast_ext.tools import quality

        return quality.main(
            quality.Options(
                model=args.model,
                out=args.out,
                pictures=args.pictures,
                steps=args.steps,
                size=args.size,
                prompts=args.prompts,
                yardstick=args.yardstick,
                exact=args.exact,
                lossy=not args.no_lossy,
                json=args.json,
            )
        )
    if args.command == "tune":
        from sfast_ext.tools import tune

        return tune.main(tune.Options(args.model, args.size, args.batch, args.tokens))
    from sfast_ext.tools import bench
    from sfast_ext.tools.lib import ways

    options = bench.Options(
        model=args.model,
        sizes=args.size,
        batches=args.batch,
        engines=args.against,
        iterations=args.iterations,
        tokens=args.tokens,
        cold=args.cold,
        cudnn_benchmark=args.cudnn_benchmark,
        json=args.json,
        full=args.full,
        ours=ways.asked(args),
    )
    return bench.main(options)
