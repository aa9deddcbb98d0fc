"""Margin between two tokens where plain and accelerated decoding first differ."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.core import Generation, SamplingParams
from outpace.draws.noise import Key, gumbel
from outpace.draws.sampling import Processor
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch


def margin(
    target: TargetModel, prompt: Seq[int], params: SamplingParams, plain: Generation, other: Generation
) -> float:
    """Difference of the two tokens' scores (noise included) at the first place where the texts differ.

    The scores come from a forward over one row, as in plain decoding.
    """
    pairs = zip(plain.tokens, other.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return float("inf")  # one text is cut short: that is never a near-tie
    prefix = [*prompt, *plain.tokens[:place]]
    cache = target.new_cache()
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: prefix[:-1]}, None))
    cache.keep({slot: range(len(prefix) - 1)})
    logits = target.forward(cache, Batch.of({slot: prefix[-1:]})).logits_of(slot)
    processor = Processor(params, prompt)
    for token in plain.tokens[:place]:
        processor.observe(token)
    scores = processor(logits[0], prefix).double()
    if not params.greedy:
        scores = scores + gumbel(Key(plain.seed).target(place), len(scores), scores.device)
    return float((scores[plain.tokens[place]] - scores[other.tokens[place]]).abs())


def explain_differences(
    target: TargetModel,
    prompts: Seq[Seq[int]],
    params: Seq[SamplingParams],
    plain: Seq[Generation],
    other: Seq[Generation],
    allowed: float,
) -> list[str]:
    """One line for each pair of texts that differs by more than a near-tie.

    Args:
        allowed: the margin of a near-tie.
    """
    wrong = []
    for place, (first, second) in enumerate(zip(plain, other, strict=True)):
        if first.tokens == second.tokens and first.finish_reason == second.finish_reason:
            continue
        gap = margin(target, prompts[place], params[place], first, second)
        if not gap < allowed:
            wrong.append(f"prompt {place} differs; margin {gap:.3g}")
    return wrong
