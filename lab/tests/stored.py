"""A datastore of the prompts, for the drafter that needs one."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer

import outpace
from lossless.prompts import PROMPTS
from outpace_lab.datastores.writer import DatastoreWriter


def with_datastore(spec: str) -> str:
    """The spec, ``{datastore}`` in it replaced by the path of a datastore of the prompts."""
    return spec.replace("{datastore}", str(_datastore()))


@lru_cache
def _datastore() -> Path:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    file = Path(tempfile.mkdtemp()) / "prompts.datastore"
    with DatastoreWriter(file, len(tokenizer)) as writer:
        for text in PROMPTS:
            writer.add(tokenizer(text).input_ids)
    return file
