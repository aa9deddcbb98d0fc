"""The options of the commands on datastores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options.shared import MODEL, OUTPUT

Sources = Annotated[
    list[Path], typer.Argument(help="Files and folders of texts or of token ids.", show_default=False)
]
DatastoreOut = Annotated[
    Path,
    typer.Option("--out", "-o", help="The datastore's file.", rich_help_panel=OUTPUT, show_default=False),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--tokenizer",
        "-m",
        help="Whose tokenizer: hub name or folder. Default: the embedded model's.",
        rich_help_panel=MODEL,
    ),
]
VocabularySize = Annotated[
    int | None,
    typer.Option(
        "--vocabulary",
        help="Instead, where all sources are token ids: how many there are.",
        min=1,
        rich_help_panel=MODEL,
    ),
]
Field = Annotated[str, typer.Option("--field", help="Where objects of a .jsonl file have their text.")]
EndToken = Annotated[
    int | None,
    typer.Option("--end-token", help="The token id that ends each document of a .npy file.", min=0),
]
SortingMemory = Annotated[
    float,
    typer.Option(
        "--memory",
        help="GB for sorting. Texts that need more are put in several shards, which makes look-ups slower.",
        min=0.001,
    ),
]
DatastoreFile = Annotated[Path, typer.Argument(help="The datastore's file.", show_default=False)]
VerifyAll = Annotated[
    bool, typer.Option("--verify", help="Read all of it, and compare it with its checksums.")
]
