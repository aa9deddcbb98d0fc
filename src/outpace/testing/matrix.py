"""The losslessness matrix: under every drafter and every sampling the tokens are those of plain decoding.

A test parametrises it with specs of drafters, and runs them on texts that the target knows, so that drafts
are accepted: in float64, where no difference is allowed, and in float32, where tokens differ at near-ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from itertools import cycle

from outpace.core import Generation, SamplingParams
from outpace.draws.noise import Key, gumbel
from outpace.draws.sampling import Processor
from outpace.engine.engine import Engine
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


SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=64),
    "top_p": SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9),
    "penalty": SamplingParams(max_new_tokens=64, temperature=1.0, repetition_penalty=1.2, min_p=0.05),
}
NEAR_TIE = 1e-4  # of scores in float32
_JOINING = 6  # prompts of a batch that is joined


class Matrix:
    """A target, prompts for it, and plain decoding of them.

    Args:
        prompts: token ids.
        complete: makes a spec of one that names files by placeholders.
    """

    def __init__(
        self, target: TargetModel, prompts: Seq[Seq[int]], complete: Callable[[str], str] = str
    ) -> None:
        self.target = target
        self.prompts = [list(prompt) for prompt in prompts]
        self._complete = complete
        self.plain = lru_cache(self._plain)
        self.alone = lru_cache(self._alone)

    def params(self, sampling: str) -> list[SamplingParams]:
        """Parameters of each prompt, each with its own seed."""
        return [replace(SAMPLINGS[sampling], seed=1000 + place) for place in range(len(self.prompts))]

    def _plain(self, sampling: str, first: int | None = None) -> list[Generation]:
        return self.decode("none", sampling, first)

    def decode(self, drafter: str, sampling: str, first: int | None = None) -> list[Generation]:
        """Generations of the first prompts (all by default), decoded together."""
        return self.engine(drafter).generate(self.prompts[:first], self.params(sampling)[:first])

    def engine(self, drafter: str, verifier: str = "match") -> Engine:
        """An engine that drafts all it can."""
        return Engine(self.target, self._complete(drafter), verifier, adaptive=False)

    def check_equal(self, drafter: str, sampling: str, first: int) -> None:
        """Check that the first prompts' tokens are equal, and take fewer steps.

        Raises:
            AssertionError: they are not, or do not.
        """
        plain, found = self.plain(sampling, first), self.decode(drafter, sampling, first)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
        assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)

    def check_near(self, drafter: str, sampling: str, first: int) -> None:
        """Check that tokens differ at near-ties only.

        Raises:
            AssertionError: there is another difference.
        """
        plain, found = self.plain(sampling, first), self.decode(drafter, sampling, first)
        self._explain(self.params(sampling)[:first], plain, found)

    def check_batch(self, drafter: str, first: int) -> None:
        """Check that the tokens of prompts decoded together are those of each alone, but for near-ties.

        Raises:
            AssertionError: there is another difference.
        """
        prompts = self.prompts[:first]
        params = [replace(own, max_new_tokens=40) for own in self.params("penalty")[:first]]
        engine = self.engine(drafter)
        together = engine.generate(prompts, params)
        alone: list[Generation] = []
        for prompt, own in zip(prompts, params, strict=True):
            alone += engine.generate([prompt], own)
        self._explain(params, alone, together)

    def check_joining(self, drafter: str) -> None:
        """Check a batch of sequences with different samplings, which they join at different steps.

        Raises:
            AssertionError: the tokens of one are not those of plain decoding alone, or steps are not fewer.
        """
        sequences, engine = [], self.engine(drafter)
        for request in self._mixed():
            sequences.append(engine.add(*request))
            engine.step()
        while engine.sequences:
            engine.step()
        plain = self.alone()
        assert [sequence.output for sequence in sequences] == [generation.tokens for generation in plain]
        assert sum(s.stats.steps for s in sequences) < sum(g.stats.steps for g in plain)

    def _mixed(self) -> list[tuple[list[int], SamplingParams]]:
        """The prompts, with the samplings in turns."""
        samplings = cycle(SAMPLINGS)
        return [
            (prompt, replace(self.params(next(samplings))[place], max_new_tokens=32))
            for place, prompt in enumerate(self.prompts[:_JOINING])
        ]

    def _alone(self) -> list[Generation]:
        return [self.engine("none").generate([prompt], own)[0] for prompt, own in self._mixed()]

    def _explain(self, params: Seq[SamplingParams], plain: Seq[Generation], found: Seq[Generation]) -> None:
        prompts = self.prompts[: len(params)]
        assert not explain_differences(self.target, prompts, params, plain, found, NEAR_TIE)


def pairs(drafters: Seq[str]) -> Iterator[tuple[str, str]]:
    """Each drafter with one sampling, in turns: a sample of the matrix."""
    return zip(drafters, cycle(SAMPLINGS), strict=False)
