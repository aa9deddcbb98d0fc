"""Documents from data sets of the Hugging Face hub, through the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outpace.core import OutpaceError, first_line, load_extra
from outpace.spec import load
from outpace_lab.train import data
from outpace_lab.train.data import Document, Encoder, parse

PREFIX = "hub:"


@dataclass(frozen=True)
class HubData:
    """A data set by name, as in ``hub:name=openai/gsm8k,config=main,split=train[:1000]``.

    Attributes:
        name: its name on the hub, or a folder that ``datasets`` can read (parquet, CSV, ...).
        config: the configuration, for a data set with several.
        split: a split in the notation of ``datasets``.
        revision: a commit or tag, for data that may change.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None


def read(source: str, encoder: Encoder, chat: bool = False) -> list[Document]:
    """Read the documents of a data set; a row has the form of a line of JSONL (``train.data.read``).

    Args:
        source: as in ``HubData``; without ``hub:`` at its start it is read by ``train.data.read``.

    Raises:
        OutpaceError: ``datasets`` is missing, or cannot find, reach or read the data set; the split is empty;
            or a row, which the message names, cannot be read.
    """
    if not source.startswith(PREFIX):
        return data.read(source, encoder, chat)
    wanted = load("data source", {PREFIX.rstrip(":"): HubData}, source)
    found: list[Document] = []
    for number, row in enumerate(_rows(wanted)):
        given = {name: value for name, value in row.items() if value is not None}
        try:
            found.append(parse(given, encoder, chat))
        except OutpaceError as error:
            raise OutpaceError(f"{wanted.name}, row {number} of {wanted.split}: {error}") from None
    if not found:
        raise OutpaceError(f"{wanted.name} has no rows in {wanted.split}; give another split")
    return found


def _rows(wanted: HubData) -> Iterable[dict[str, Any]]:
    datasets = load_extra("datasets", "data other than a .jsonl file", "train", "outpace-lab")
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            wanted.name, wanted.config, split=wanted.split, revision=wanted.revision
        )
    except Exception as error:  # the library, the hub and the formats may raise anything
        raise OutpaceError(
            f"cannot load the data set {wanted.name} (config {wanted.config}, split {wanted.split}): "
            f"{first_line(error)}. Without a network only the local cache is available; or give a folder "
            "as its name"
        ) from error
    return rows
