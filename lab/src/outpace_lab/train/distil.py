"""Sequence-level distillation: the target answers the prompts, and the drafter learns its answers.

Kim and Rush 2016, Sequence-Level Knowledge Distillation, arXiv 1606.07947, section 3.2. The answers are
decoded by the engine, greedily by default, where the paper takes the best of a beam.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets.base import TargetModel
from outpace_lab.train.data import Document


def answer(
    target: TargetModel,
    documents: Seq[Document],
    params: SamplingParams,
    together: int = 32,
) -> list[Document]:
    """Let the target answer each document's prompt; a text without a prompt is a prompt as a whole.

    Args:
        together: prompts decoded at once; as one ends, another begins.

    Raises:
        OutpaceError: the parameters contain stop strings, for which the engine has no tokenizer here.
    """
    if params.stop:
        raise OutpaceError("answers can stop only at tokens: give stop_token_ids instead of stop")
    engine = Engine(target, "prompt_lookup", max_running=together)
    prompts = [document.tokens[: document.prompt] or document.tokens for document in documents]
    own = [
        params if params.seed is None else replace(params, seed=(params.seed + place) % 2**64)
        for place in range(len(prompts))
    ]
    sources = [document.source or None for document in documents]
    found = engine.generate(prompts, own, sources=sources)
    return [
        Document((*prompt, *generation.tokens), len(prompt), source=document.source)
        for document, prompt, generation in zip(documents, prompts, found, strict=True)
        if generation.tokens
    ]
