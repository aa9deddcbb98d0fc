"""The laboratory's drafters that copy, on models that llama.cpp runs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import gguf_file
from llamacpp import test_matrix as own
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_lab.drafters.retrieval.retrieval import Retrieval


@lru_cache(maxsize=len(own.FILES))
def datastore(dtype: str) -> Path:
    """A datastore of the outputs of plain decoding."""
    file = gguf_file(dtype).with_suffix(".datastore")
    with DatastoreWriter(file, own.target(dtype).vocabulary) as writer:
        for sampling in own.SAMPLINGS:
            for text in own.plain(dtype, sampling):
                writer.add(text)
    return file


@pytest.mark.parametrize("sampling", own.SAMPLINGS)
@pytest.mark.parametrize("dtype", own.FILES)
def test_tokens_of_retrieval_are_those_of_plain_decoding(
    dtype: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(own.DRAFTERS, "retrieval", lambda dtype: Retrieval(datastore(dtype)))
    own.test_tokens_are_those_of_plain_decoding(dtype, "retrieval", sampling)
