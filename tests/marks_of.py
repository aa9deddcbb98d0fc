"""The embedded model with marks of a format in its tokenizer, of any kind, and answers it is made to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outpace.engine.engine import Engine
from outpace.loading import Loaded
from serving import model

Kind = Literal["text", "added", "special", "listed"]
KINDS: tuple[Kind, ...] = ("text", "added", "special", "listed")


def with_marks(template: str, marks: Sequence[str], kind: Kind) -> Loaded:
    """The embedded model with this template, whose tokenizer has marks in place of tokens that nothing needs.

    Args:
        kind: marks are text, tokens that are added, special ones, or special ones that are listed as such.
    """
    own = model().tokenizer
    raw = json.loads(own.backend_tokenizer.to_str())
    if kind != "text":
        parts = {part for merge in raw["model"]["merges"] for part in merge}
        free = [token for token in raw["model"]["vocab"] if token not in parts and token.isalpha()]
        made = dict(zip(free, marks, strict=False))
        whole = {f"{left}{right}": [left, right] for left, right in raw["model"]["merges"]}
        gone = [whole[token] for token in made if token in whole]
        raw["model"]["merges"] = [merge for merge in raw["model"]["merges"] if merge not in gone]
        raw["model"]["vocab"] = {
            made.get(token, token): place for token, place in raw["model"]["vocab"].items()
        }
    backend = Tokenizer.from_str(json.dumps(raw))
    added = [AddedToken(mark, special=kind != "added", normalized=False) for mark in marks]
    if kind == "added":
        backend.add_tokens(added)
    elif kind in ("special", "listed"):
        backend.add_special_tokens(added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=own.eos_token,
        **({"additional_special_tokens": list(marks)} if kind == "listed" else {}),
    )
    tokenizer.chat_template = template
    return replace(model(), tokenizer=tokenizer)


def saying(tokens: Sequence[int]) -> Callable[[Engine], None]:
    """A change of an engine by which every answer begins with these tokens, where a grammar allows them."""

    def change(engine: Engine) -> None:
        add = engine.add

        def saying_add(prompt: Any, params: Any = None, **more: Any) -> Any:
            def said(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                place = input_ids.shape[1] - len(prompt)
                if place < len(tokens):
                    scores = scores.clone()
                    scores[..., tokens[place]] += 1e6
                return scores

            processors = [*params.logits_processors, said]
            return add(prompt, replace(params, logits_processors=processors), **more)

        engine.add = saying_add  # type: ignore[method-assign]

    return change
