"""Sequence-level distillation: the target answers the prompts, and its answers are what is learnt.

Kim and Rush 2016, Sequence-Level Knowledge Distillation, arXiv 1606.07947, section 3.2. The answers are
decoded by the engine, greedily unless asked otherwise, where the paper takes the best of a beam.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets.base import TargetModel
from outpace.train.data import Document


def answer(
    target: TargetModel,
    documents: Seq[Document],
    params: SamplingParams,
    together: int = 16,
    drafter: str = "prompt_lookup",
    report: Callable[[int], None] = lambda done: None,
) -> list[Document]:
    """Documents whose text after the prompt is the target's own; a text without a prompt is one.

    Args:
        together: prompts decoded at once.
        drafter: speeds it up; it changes no token.
        report: called with the number of prompts answered since the last call.

    Raises:
        OutpaceError: the parameters stop at strings, for which the engine has no tokenizer here.
    """
    if params.stop:
        raise OutpaceError("answers stop at tokens: give stop_token_ids in place of stop")
    engine = Engine(target, drafter)
    found: list[Document] = []
    for start in range(0, len(documents), together):
        batch = documents[start : start + together]
        prompts = [document.tokens[: document.prompt] or document.tokens for document in batch]
        own = [
            params if params.seed is None else replace(params, seed=(params.seed + start + place) % 2**64)
            for place in range(len(batch))
        ]
        for prompt, generation in zip(prompts, engine.generate(prompts, own), strict=True):
            if generation.tokens:
                found.append(Document((*prompt, *generation.tokens), len(prompt)))
        report(len(batch))
    return found
