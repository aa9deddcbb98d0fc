"""Plug-ins: classes and functions that are found by name, outpace's own and those of other packages.

outpace's own drafters and verifiers are those that its packages define. Other packages register theirs as
entry points in the groups

* ``outpace.drafters`` and ``outpace.verifiers``: dataclasses that derive from ``Drafter`` or ``Verifier``;
* ``outpace.commands``: ``register(app: typer.Typer) -> None``, which adds commands to the command line;
* ``outpace.suites``: ``load(data: Path | None) -> Suite``, prompts for ``outpace bench``;
* ``outpace.peers``: ``outpace.bench.peers.Library``, another engine for ``outpace bench``;
* ``outpace.observers``: dataclasses that derive from ``outpace.cli.observing.Attachment``, for
  ``--observer``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import GenericAlias, ModuleType
from typing import Any, TypeGuard, TypeVar, cast

from outpace.core import OutpaceError, first_line, install

T = TypeVar("T")

# Names that are in outpace-lab, and what they are.
_LAB = {
    "drafter": (
        "blockwise", "cascade", "early_exit", "parallel_tokens", "retrieval", "self_speculative",
        "spec_drafter", "token_recycling", "windowed",
    ),
    "verifier": ("bild", "block", "lenient", "spectr", "top_beta", "traversal", "typical"),
    "benchmark": ("compare", "lab", "scaling"),
    "command": ("datastore", "drift", "gguf", "grow", "search", "train", "tune"),
    "observer": ("online", "topics"),
    "peer": ("llama-server", "llama.cpp", "vllm"),
    "suite": ("gsm8k", "humaneval", "mt_bench", "spec_bench", "speed_bench"),
}  # fmt: skip


def why_absent(kind: str, name: str) -> str | None:
    """How to get a name that is in outpace-lab; None for any other."""
    known = name in _LAB.get(kind, ())
    return f"{name} is in outpace-lab: {install(package='outpace-lab')}" if known else None


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of other packages in the group ``outpace.{group}``, by name, without importing them.

    Raises:
        OutpaceError: two packages register different things under one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"outpace.{group}"):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise OutpaceError(
                f"two packages register {entry.name!r} in outpace.{group}: {package_of(other)} "
                f"({other.value}) and {package_of(entry)} ({entry.value}); uninstall one of them"
            )
    return found


def package_of(entry: EntryPoint) -> str:
    """The name and version of the package that registers an entry point."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load_class(kind: str, entry: EntryPoint, base: type[T]) -> type[T]:
    """The class of an entry point.

    Raises:
        OutpaceError: it cannot be imported, or it is not a dataclass that derives from ``base``.
    """
    return checked_class(kind, f"{entry.name!r} of {package_of(entry)}", entry.load, base)


def load_object(kind: str, entry: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        OutpaceError: it cannot be imported.
    """
    return _imported(kind, f"{entry.name!r} of {package_of(entry)}", entry.load)


def checked_class(kind: str, name: str, read: Callable[[], Any], base: type[T]) -> type[T]:
    """The class that ``read`` imports.

    Raises:
        OutpaceError: it cannot be imported, or it is not a dataclass that derives from ``base``.
    """
    found = _imported(kind, name, read)
    if not _derives(found, base):
        raise OutpaceError(
            f"{name} is not a {kind}: it is {found!r}, and a {kind} is a class that derives from "
            f"{base.__module__}.{base.__qualname__}"
        )
    # Otherwise its annotations would be ignored, and its options would be those of its base.
    if "__dataclass_params__" not in vars(found):
        raise OutpaceError(f"the {kind} {name} is not a dataclass; put @dataclass(frozen=True) before it")
    return found


def _derives(value: Any, base: Callable[..., T]) -> TypeGuard[type[T]]:
    """True for a class that derives from another; in Python 3.10 list[int] is an instance of type, too."""
    if isinstance(value, GenericAlias):
        return False
    return isinstance(value, type) and issubclass(value, cast(type[T], base))


def _imported(kind: str, name: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a module may raise anything while it is imported
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise OutpaceError(f"the {kind} {name} cannot be imported: {reason}") from error


def defined(package: str, base: Callable[..., T], mark: str) -> list[type[T]]:
    """The classes that derive from ``base``, in the modules of a package.

    Args:
        base: a class, which may be abstract.
        mark: an attribute that a class sets itself, unless it is a base of others.
    """
    return [
        value
        for module in _modules(import_module(package))
        for value in vars(module).values()
        if _derives(value, base)
        if value.__module__ == module.__name__ and mark in vars(value)
    ]


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        loaded = import_module(module.name)
        yield loaded
        if module.ispkg:
            yield from _modules(loaded)
