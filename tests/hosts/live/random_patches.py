"""An extension of AUTOMATIC1111 and of SD.Next for these tests: lays patches and takes them away at given steps.

Copied with `random_sites.py` into the extensions of a data directory. `POST /test/v1/events` takes the events of the
next image, lays or takes at once those of step -1, and answers what came of the image before: the steps it had and
what failed.
"""

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from modules import paths, script_callbacks, shared

HERE = Path(__file__).resolve()
HOST = "sdnext" if importlib.util.find_spec("modules.modeldata") else "a1111"


def beside(name: str) -> Any:
    """A module in the folder of this one."""
    spec = importlib.util.spec_from_file_location(name, HERE.with_name("texts") / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look there for the module that they are written in
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


sites = beside("random_sites")
loaded: dict[tuple[str, str, str], ModuleType] = {}
laid: dict[int, tuple[Callable[[], None], Callable[[float], None] | None]] = {}
schedule: dict[int, list[dict[str, Any]]] = {}
seen: list[int] = []
failed: list[str] = []


def place(kind: str, home: str) -> tuple[str, Path]:
    """The name and the file of a third party's module."""
    name = kind.replace(" ", "_").replace("-", "_")
    if home == "package":
        return f"unet_{name}", Path(sysconfig.get_path("purelib")) / f"unet_{name}" / "__init__.py"
    # hosts call a script's module by its file
    folder = HERE.parents[2] / name if home == "extension" else Path(paths.script_path)
    return f"{name}.py", folder / "scripts" / f"{name}.py"


def load(kind: str, keep: str, home: str) -> ModuleType:
    """A third party's module, as if it had been imported from its place."""
    key = (kind, keep, home)
    if key not in loaded:
        name, file = place(kind, home)
        module = loaded[key] = ModuleType(name)
        module.__file__ = str(file)
        sys.modules[name] = module
        exec(compile(sites.source(kind, keep, HOST), str(file), "exec"), vars(module))
    return loaded[key]


def unet() -> Any:
    return shared.sd_model.unet if HOST == "sdnext" else shared.sd_model.model.diffusion_model


def play(event: dict[str, Any]) -> None:
    """One event; one whose patch was not laid is nothing."""
    which = event["id"]
    if event["op"] == "lay":
        module = load(event["kind"], event["keep"], event["home"])
        laid[which] = module.lay(unet(), event["seed"], event["strength"])
    elif which in laid:
        take, turn = laid[which]
        if event["op"] == "take":
            del laid[which]
            take()
        else:
            turn(event["strength"])


def at(step: int) -> None:
    """A step is about to begin."""
    try:
        if step >= 0:
            seen.append(step)
            for module in loaded.values():
                module.STEP = step
                if hasattr(module, "at_step"):
                    module.at_step(step)
        for event in schedule.pop(step, ()):
            play(event)
    except Exception:
        failed.append(traceback.format_exc())


def events(told: dict[str, Any]) -> dict[str, Any]:
    """The route."""
    answer = {"steps": list(seen), "failed": list(failed), "left": sorted(schedule), "laid": sorted(laid)}
    for each in (seen, failed, schedule):
        each.clear()
    for event in told["events"]:
        schedule.setdefault(event["step"], []).append(event)
    at(-1)
    return answer


def started(_: Any, app: Any) -> None:
    app.add_api_route("/test/v1/events", events, methods=["POST"])


def between_steps() -> None:
    """SD.Next has no callback before a step: there is one after it."""
    from modules import processing_args

    original = processing_args.diffusers_callback

    def stepped(pipe: Any, step: int = 0, timestep: int = 0, kwargs: Any = None) -> Any:
        at(step + 1)
        return original(pipe, step, timestep, kwargs)

    processing_args.diffusers_callback = stepped


script_callbacks.on_app_started(started)
if HOST == "a1111":
    # what it says of the step is the one before, from the second step on
    script_callbacks.on_cfg_denoiser(lambda params: at(len(seen)))
else:
    script_callbacks.on_before_process(lambda p: at(0))
    between_steps()
