"""The command line: doctor, demo, bench, quality, tune. What they do is in `tools`, imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sfast_ext.cli import interpreter, parsers
from sfast_ext.cli.parsers import add_lossy, add_stack, parser
from sfast_ext.cli.values import (
    ATTENTIONS,
    DTYPES,
    ENGINES,
    capability,
    count,
    counts,
    engines,
    make_room,
    size,
    sizes,
)
from sfast_ext.tools.lib import Unavailable, weight_files

__all__ = [
    "ATTENTIONS",
    "DTYPES",
    "ENGINES",
    "add_lossy",
    "add_stack",
    "capability",
    "count",
    "counts",
    "engines",
    "main",
    "parser",
    "size",
    "sizes",
]
REFUSED, INTERRUPTED = 2, 130
"""The exit status if a command cannot do what it is asked for, and after Ctrl-C."""
NEEDS: dict[str, tuple[str, ...]] = {
    "doctor": ("torch",),
    "demo": ("torch", "diffusers", "transformers", "safetensors", "tqdm", "PIL"),
    "bench": ("torch", "diffusers", "transformers", "safetensors", "numpy"),
    "quality": ("torch", "diffusers", "transformers", "safetensors", "tqdm", "PIL"),
    "tune": ("torch", "diffusers", "transformers", "safetensors", "numpy"),
}
"""The packages that a command imports. Commands that make a plan of nothing need torch alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. What cannot be done is said in one line."""
    for stream in (sys.stdout, sys.stderr):
        # into a file or a pipe, Windows writes in a code page that has not every character
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args = parsers.parsed(given)
        if args is None:
            return REFUSED
        interpreter.check(NEEDS[args.command], given)
        make_room(getattr(args, "json", None) if args.command != "doctor" else None, getattr(args, "out", None))
        return _run(args)
    except Unavailable as exc:
        return _refused(given, str(exc))
    except ImportError as exc:
        return _refused(given, interpreter.told(exc, given))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as exc:
        if not _out_of_memory(exc):
            raise
        return _refused(given, f"out of memory ({weight_files.first_line(exc)}): name a smaller --size or --model")


def _refused(given: Sequence[str], why: str) -> int:
    command = next((word for word in given if word in NEEDS), "")
    print(f"{parsers.PROGRAM} {command}".strip() + f": error: {' '.join(why.split())}", file=sys.stderr)
    return REFUSED


def _out_of_memory(exc: BaseException) -> bool:
    """torch has an exception for a GPU that is full, and none for a CPU."""
    words = "out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed"
    return isinstance(exc, MemoryError) or any(each in str(exc) for each in words)


def _run(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from sfast_ext.tools import doctor

        return doctor.main(args.json, args.eight_bits)
    if args.command == "demo":
        from sfast_ext.tools import demo

        lossy = args.faster_sums, args.eight_bits
        return demo.main(demo.Options(args.model, args.out, args.steps, args.size, args.json, args.verbose, *lossy))
    if args.command == "quality":
        from sfast_ext.tools import quality

        return quality.main(
            quality.Options(
                model=args.model,
                out=args.out,
                images=args.images,
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
