"""``outpace datastore``: build a datastore from texts or token ids, and describe one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outpace.cli import options as o
from outpace.cli import progress, screen
from outpace.cli.app import app, guarded, show
from outpace.cli.layout import App, Group
from outpace.cli.writer import check_out
from outpace.core import OutpaceError
from outpace.names import check_model
from outpace_lab.cli import corpus
from outpace_lab.cli.corpus import Piece

SourcePaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE...", help="Files and folders of texts or of token ids.", show_default=False
    ),
]
DatastoreOut = Annotated[
    Path, o.output_option("--out", "-o", metavar="PATH", help="The datastore's file.", show_default=False)
]
TokenizerName = Annotated[
    str | None,
    o.model_option(
        "--model",
        "--tokenizer",
        "-m",
        metavar="MODEL",
        help="Model whose tokenizer is used: hub name or folder. Default: the embedded model.",
    ),
]
VocabularySize = Annotated[
    int | None,
    o.model_option(
        "--vocabulary",
        metavar="N",
        help="Size of the vocabulary, in place of --model if all sources are token ids.",
        min=1,
    ),
]
Field = Annotated[
    str, typer.Option("--field", metavar="NAME", help="Field of a .jsonl file's objects with the text.")
]
EndToken = Annotated[
    int | None,
    typer.Option(
        "--end-token", metavar="ID", help="The token id that ends each document of a .npy file.", min=0
    ),
]
SortingMemory = Annotated[
    float,
    typer.Option(
        "--memory",
        metavar="GB",
        help="GB for sorting. Texts that need more go into several shards, which slows look-ups down.",
        min=0.001,
    ),
]
DatastoreFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The datastore's file.", show_default=False)
]
VerifyAll = Annotated[
    bool, typer.Option("--verify", help="Read the whole file and compare it with its checksums.")
]

datastores = App(
    cls=Group, help="Build and inspect datastores for the drafter `retrieval`.", no_args_is_help=True
)
app.add_typer(datastores, name="datastore")


@datastores.command("build", epilog="Example: outpace datastore build texts/ --out texts.datastore")
@guarded
def build_datastore(
    sources: SourcePaths,
    out: DatastoreOut,
    model: TokenizerName = None,
    vocabulary: VocabularySize = None,
    field: Field = "text",
    end_token: EndToken = None,
    memory: SortingMemory = 2.0,
    trust_remote_code: o.Trust = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
) -> None:
    """Build a datastore for the drafter `retrieval` from texts or token ids.

    A file is one document; a .jsonl file has one per line: a text, a list of
    token ids, or an object with either. A .npy file of token ids is one
    document, or has one per row. All text files of a folder are read.
    Ctrl-C leaves nothing behind.
    """
    if model is not None and vocabulary is not None:
        raise OutpaceError("give --model or --vocabulary, not both")
    if not Path(model or "").is_dir():  # a folder may have a tokenizer alone
        check_model(model)
    check_out(out, overwrite)
    files, passed = corpus.find(sources)
    if passed:
        screen.note(f"skipped, not text: {len(passed)} files, such as {passed[0]}")
    if vocabulary is not None:
        words = Vocabulary(vocabulary)
    else:
        with screen.busy(f"loading the tokenizer of {model or 'the embedded model'} ..."):
            words = vocabulary_of(model, trust_remote_code)
    pieces = (piece for file in files for piece in corpus.read(file, field, end_token))
    size = sum(file.stat().st_size for file in files)
    show(build(pieces, size, words, out, int(memory * 2**30)), as_json, table)


@datastores.command("info", epilog="Example: outpace datastore info texts.datastore --verify")
@guarded
def datastore_info(file: DatastoreFile, verify: VerifyAll = False, as_json: o.AsJson = False) -> None:
    """Print the contents of a datastore."""
    show(describe(file, verify), as_json, table)


_TOGETHER = 1 << 20  # bytes of text that are tokenised in one call
_UNIT = 1_000_000  # bytes of the sources per step of the bar


@dataclass(frozen=True)
class Vocabulary:
    """Size of the vocabulary, and the tokenizer, if there is one."""

    size: int
    name: str = ""
    fingerprint: str = ""
    tokenizer: Callable[..., Any] | None = None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens at their ends.

        Raises:
            OutpaceError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise OutpaceError(
                "there is text among the sources; give its tokenizer, --model, instead of --vocabulary"
            )
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False).input_ids
        return found


def vocabulary_of(model: str | None, trust_remote_code: bool) -> Vocabulary:
    """The vocabulary of a model's tokenizer; by default the embedded model's."""
    from outpace.loading.weights import load_tokenizer
    from outpace_lab.datastores.header import fingerprint

    name, tokenizer = load_tokenizer(model, trust_remote_code)
    entries = tokenizer.get_vocab()
    return Vocabulary(max(entries.values()) + 1, name, fingerprint(entries), tokenizer)


def build(
    pieces: Iterator[Piece], size: int, vocabulary: Vocabulary, out: Path, memory: int
) -> dict[str, Any]:
    """Build a datastore; return its ``describe``, with the seconds it took.

    Args:
        size: bytes of all pieces.
        memory: bytes that sorting may take.
    """
    from outpace_lab.datastores.writer import DatastoreWriter

    began = time.perf_counter()
    with progress.bar(-(-size // _UNIT) or 1, "MB read") as bar:
        writer = DatastoreWriter(
            out,
            vocabulary.size,
            memory,
            vocabulary.name,
            vocabulary.fingerprint,
            sorting=lambda rows: bar.note(f"sorting {rows:,} tokens ..."),
        )
        with writer:
            done = 0
            for batch in _batches(pieces):
                for tokens, piece in zip(_tokens(batch, vocabulary), batch, strict=True):
                    writer.add(tokens, piece.last)
                before, done = done, done + sum(piece.size for piece in batch)
                bar.advance(f"{writer.tokens:,} tokens", steps=done // _UNIT - before // _UNIT)
    return describe(out) | {"seconds": time.perf_counter() - began}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, so that calls of the tokenizer are large enough."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokens(pieces: list[Piece], vocabulary: Vocabulary) -> list[Any]:
    """The token ids of each piece."""
    texts = [piece.content for piece in pieces if isinstance(piece.content, str)]
    encoded = iter(vocabulary.encode(texts) if texts else ())
    return [next(encoded) if isinstance(piece.content, str) else piece.content for piece in pieces]


def describe(file: Path, verify: bool = False) -> dict[str, Any]:
    """Contents of a datastore, as JSON values.

    Args:
        verify: read the whole file and compare it with its checksums.

    Raises:
        OutpaceError: it is not a datastore, or it is damaged.
    """
    if not file.is_file():
        raise OutpaceError(f"no such file: {file}; `outpace datastore build` writes datastores")
    with screen.busy(f"reading {file} ..."):
        from outpace_lab.datastores.datastore import Datastore

        datastore = Datastore(file)
        if verify and not datastore.verified:
            datastore.verify()
    header = datastore.header
    return {
        "file": str(file),
        "bytes": header.file_bytes,
        "tokens": header.tokens,
        "documents": header.documents,
        "vocabulary": header.vocabulary,
        "bytes_per_token": header.width,
        "tokenizer": header.tokenizer,
        "fingerprint": header.fingerprint,
        "shards": [shard.rows for shard in header.shards],
        "verified": datastore.verified,
    }


def table(found: dict[str, Any]) -> Table:
    """The description as a table."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    rows = {
        "file": screen.printable(found["file"]),
        "size": f"{found['bytes']:,} bytes",
        "tokens": f"{found['tokens']:,} in {found['documents']:,} documents",
        "vocabulary": f"{found['vocabulary']:,} tokens, {found['bytes_per_token']} bytes each",
        "tokenizer": screen.printable(found["tokenizer"]) or "none: built from token ids",
        "fingerprint": found["fingerprint"] or "none",
        "shards": str(len(found["shards"])),
        "checksums": "all match" if found["verified"] else "not compared (--verify)",
    }
    if "seconds" in found:
        rows["built in"] = f"{found['seconds']:.1f} s"
    for name, value in rows.items():
        grid.add_row(name, value)
    return grid
