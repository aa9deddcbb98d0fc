"""The embedded models as GGUF files, made once for a run of tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.bench.lab.gguf import write_gguf
from outpace.embedded import nano_draft_path, nano_path


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(mkdtemp(prefix="outpace-gguf-"))


@lru_cache(maxsize=2)
def _model(draft: bool) -> tuple[Any, Any]:
    path = nano_draft_path() if draft else nano_path()
    return (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )


@lru_cache(maxsize=16)
def gguf_file(dtype: str, draft: bool = False) -> Path:
    """The embedded model, or the embedded draft model, as a GGUF file with its tokenizer."""
    model, tokenizer = _model(draft)
    path = _folder() / f"{'draft' if draft else 'nano'}-{dtype}.gguf"
    write_gguf(model, path, dtype, tokenizer)
    return path
