"""``outpace env``: what is installed, what this machine can do, and how a model would run here."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace._version import __version__
from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded, show
from outpace.cli.given import LoadingOptions, ModelOptions, StepOptions, taking
from outpace.core import EXTRAS, OutpaceError, install, missing
from outpace.embedded import NoHome, cache_path

if TYPE_CHECKING:
    from outpace.loading import Loaded

_Look = Callable[[], dict[str, Any]]
_Table = Callable[[dict[str, Any]], RenderableType]
_PACKAGES = ("torch", "transformers", "huggingface-hub", "numpy", "outpace-lab")


@dataclass(frozen=True, kw_only=True)
class EnvOptions(ModelOptions, LoadingOptions, StepOptions):
    """The options of ``outpace env``."""

    as_json: o.AsJson = False


@app.command(epilog="Example: outpace env --model smollm2")
@guarded
@taking(EnvOptions)
def env(given: EnvOptions) -> None:
    """Print versions, device, instruction sets, compiler, caches and extras.

    With --model also how that model would run here: which steps, in which dtype, and why not others.
    """
    looks: list[tuple[_Look, _Table]] = [(_installed, _of_installed), (_machine, _of_machine)]
    if given.model is not None:
        looks.append((partial(_served, given), _of_model))
    found: dict[str, Any] = {}
    for look, table in looks:
        seen = look()
        if not given.as_json:  # the next takes seconds
            show(seen, False, table)
        found |= seen
    if given.as_json:
        show(found, True, _of_installed)


def _installed() -> dict[str, Any]:
    """What is installed, as far as the system says without torch."""
    from outpace.native.build import compiler_command
    from outpace.native.instructions import chosen, instructions, limits
    from outpace.native.systems import machine

    limit, command = chosen(), compiler_command()
    return {
        "outpace": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cores": os.cpu_count(),
        "instructions": limits(machine(), instructions()),
        "limited_to": None if limit is None else limit.march,
        "compiler": None if isinstance(command, str) else command[0],
        "cache": _cache(),
        "extras": {extra: missing(extra) for extra in EXTRAS},
    }


def _machine() -> dict[str, Any]:
    """What this machine can do, as far as torch and trials say."""
    with screen.busy("looking at this machine ..."):
        import torch

        from outpace.native.memory import pages
        from outpace.targets.cpu.trials import settled_threads
        from outpace.targets.hardware import processor

        threads, gpus = settled_threads(), range(torch.cuda.device_count())
        return {
            "processor": processor(),
            "threads": threads.number,
            "threads_because": threads.because,
            "pages_of_weights": pages(),
            "gpus": [torch.cuda.get_device_name(place) for place in gpus],
            "compiled": _why_not_compiled() or "",
        }


def _served(given: EnvOptions) -> dict[str, Any]:
    """How a model would run: whether it is served, and by which steps."""
    try:
        loaded = given.source(given.model, options=given.steps(), releases=True).load()
    except OutpaceError as error:
        return {"model": {"name": given.model, "served": False, "reason": str(error)}}
    return {"model": served(loaded)}


def served(loaded: Loaded) -> dict[str, Any]:
    from outpace.engine.slow import reasons
    from outpace.engine.usual import usual

    target, plan = loaded.target, loaded.target.plan
    drafter = usual(target)
    return {
        "name": loaded.name,
        "served": True,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "dtype_because": plan.dtype,
        "drafter": drafter.spec,
        "drafter_because": drafter.because,
        "step": plan.name,
        "native": plan.native,
        "packed": dict(plan.packed),
        "bit_exact": target.bit_exact,
        "why_inexact": target.why_inexact,
        "promise": target.promise,
        "why_chains_only": target.why_chains_only,
        "context": target.context,
        "state_bytes": target.state_bytes or None,
        "passed_over": [{"step": one.name, "reason": one.reason} for one in plan.passed_over],
        "slow": list(reasons(target)),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _why_not_compiled() -> str | None:
    """Why functions in C are not used, or are compiled in each process; None if they are there."""
    import torch

    from outpace.native.build import why_compiled_anew
    from outpace.native.layers import functions

    found = functions(torch.bfloat16)
    return found if isinstance(found, str) else why_compiled_anew()


def _cache() -> str | None:
    try:
        return str(cache_path())
    except NoHome:
        return None


def _of_installed(found: dict[str, Any]) -> RenderableType:
    rows = {**found}
    installs = {
        f"outpace[{extra}]": f"{install(extra)} ({', '.join(lacks)})" if lacks else "installed"
        for extra, lacks in rows.pop("extras").items()
    }
    return Group(_grid(rows), Text(""), _grid(installs), Text(""))


def _of_machine(found: dict[str, Any]) -> RenderableType:
    rows = {**found}
    rows["threads"] = f"{rows['threads']}: {rows.pop('threads_because')}"
    rows["pages of weights"] = rows.pop("pages_of_weights")
    rows["functions in C"] = rows.pop("compiled") or "compiled"
    return _grid(rows)


def _of_model(found: dict[str, Any]) -> RenderableType:
    model = {**found["model"]}
    passed, packed = model.pop("passed_over", []), model.pop("packed", {})
    rows = {name.replace("_", " "): value for name, value in model.items() if value not in ("", None, [])}
    if packed:
        rows["packed"] = ", ".join(f"{count} layers by {kernel}" for kernel, count in packed.items())
    rows |= {f"not {one['step']}": one["reason"] for one in passed}
    return Group(Text(""), _grid(rows))


def _grid(rows: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows.items():
        grid.add_row(Text(name), Text(_words(value), overflow="fold"))
    return grid


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
