"""Where two outputs part, and how near the tie was."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.core import OutpaceError
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.transfer import widened

_CHUNK = 512  # tokens fed in one forward


def parting(plain: Seq[int], output: Seq[int]) -> int | None:
    """The first position where two outputs of one prompt differ, or one has ended; None if equal."""
    if list(plain) == list(output):
        return None
    pairs = zip(plain, output, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(output)))


def margin(target: TargetModel, text: Seq[int], source: Any = None) -> float:
    """Difference of the logits of the two best tokens after a text: close to 0 for a near-tie.

    Args:
        text: token ids of prompt and output so far, at least one.
        source: the encoder's input, for a target that has one.
    """
    cache = target.new_cache(1, len(text))
    slot = target.open(cache, target.encode(source))
    rows = None
    for start in range(0, len(text), _CHUNK):
        chunk = text[start : start + _CHUNK]
        last = len(chunk) - 1 if start + _CHUNK >= len(text) else None
        rows = target.forward(cache, Batch.of({slot: chunk}, last)).logits
        cache.keep({slot: range(len(chunk))})
    if rows is None:
        raise OutpaceError("the prompt is empty: it needs at least one token")
    best, second = widened(rows[-1]).topk(2).values.tolist()
    return float(best - second)


def margin_of(target: TargetModel, asked: Seq[int], output: Seq[int]) -> float:
    """``margin`` after the first tokens of an output for a text, given as token ids."""
    prompt, source = target.parts(asked)
    return margin(target, [*prompt, *output], source)
