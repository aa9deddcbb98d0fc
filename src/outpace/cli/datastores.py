"""Commands on datastores: build, info."""

from __future__ import annotations

from outpace.cli import screen
from outpace.cli.app import datastores, guarded, show
from outpace.cli.options import datastores as own
from outpace.cli.options import shared as o
from outpace.cli.writer import check_out
from outpace.core import OutpaceError


@datastores.command(
    "build", epilog="Example: [bold]outpace datastore build texts/ --out texts.datastore[/bold]"
)
@guarded
def build_datastore(
    sources: own.Sources,
    out: own.DatastoreOut,
    model: own.TokenizerName = None,
    vocabulary: own.VocabularySize = None,
    field: own.Field = "text",
    end_token: own.EndToken = None,
    memory: own.SortingMemory = 2.0,
    trust_remote_code: o.Trust = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
) -> None:
    """A datastore for the drafter `retrieval`, of texts or of token ids.

    A file is one document, a .jsonl file has one in each line: a text, a list
    of token ids, or an object with either. A .npy file of token ids is one, or
    has one in each row. Of a folder, every file that holds text is read.
    Ctrl-C leaves nothing behind.
    """
    if model is not None and vocabulary is not None:
        raise OutpaceError("give --model or --vocabulary, not both")
    from outpace.cli import datastore

    check_out(out, overwrite)
    found = datastore.sources(sources, field, end_token)
    if vocabulary is not None:
        words = datastore.Vocabulary(vocabulary)
    else:
        with screen.busy(f"loading the tokenizer of {model or 'the embedded model'} ..."):
            words = datastore.vocabulary_of(model, trust_remote_code)
    built = datastore.build(found, words, out, int(memory * 2**30))
    show(built, as_json, datastore.table)


@datastores.command("info", epilog="Example: [bold]outpace datastore info texts.datastore --verify[/bold]")
@guarded
def datastore_info(file: own.DatastoreFile, verify: own.VerifyAll = False, as_json: o.AsJson = False) -> None:
    """What a datastore holds."""
    from outpace.cli import datastore

    show(datastore.describe(file, verify), as_json, datastore.table)
