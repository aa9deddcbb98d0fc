"""Learned drafters for the embedded model: those in ``tests/trained``, and a prediction layer fitted here."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from lossless.prompts import PROMPTS
from mtp_folders import write_beside

TRAINED = Path(__file__).parents[1] / "trained"


def with_trained(spec: str) -> str:
    """The spec, ``{trained}`` in it replaced by the folder of such a drafter."""
    name = spec.partition(":")[0]
    if "{trained}" not in spec:
        return spec
    return spec.replace("{trained}", str(_predicting() if name == "mtp" else TRAINED / name))


@lru_cache
def _predicting() -> Path:
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    return write_beside(Path(tempfile.mkdtemp()), model, [tokenizer(text).input_ids for text in PROMPTS])
