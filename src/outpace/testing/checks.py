"""Checks of a drafter against the contract in ``outpace.drafters.base``, to be called in a test."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from outpace.core import Draft, Generation, SamplingParams
from outpace.drafters.base import Drafter
from outpace.engine.engine import Engine
from outpace.policy.plan import DraftPlan, Outcome
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.testing.toy import ToyTarget
from outpace.testing.watch import Watch, watch_of

_PARAMS = (
    SamplingParams(max_new_tokens=28),
    SamplingParams(max_new_tokens=28, temperature=1.0, seed=1),
    SamplingParams(max_new_tokens=28, temperature=0.7, top_k=12, top_p=0.95, seed=2),
    SamplingParams(max_new_tokens=20, temperature=1.3, repetition_penalty=1.3, seed=2**63 + 3),
    SamplingParams(max_new_tokens=20, presence_penalty=0.5, frequency_penalty=0.2, ignore_eos=True),
)
_SEEDS = 512  # sequences behind each test of a distribution
_FAR = 5.0  # standard deviations that a test of a distribution may be off: by chance, one run in a million


def check_drafter(drafter: Drafter[Any], target: TargetModel | None = None) -> None:
    """Check a drafter against the contract; call it in a test.

    - Class: a frozen dataclass whose options survive ``dataclasses.replace``, pickle and deepcopy.
    - Drafts: trees of tokens of the vocabulary; if it samples, with the distributions of its draws; if it
      states chances, none above its parent's.
    - Tokens: those of plain decoding, greedy and sampled, in batches that sequences join and leave, up to the
      end of the context.
    - Budgets: it handles steps that use none of its draft, or only the first nodes.
    - State: none on the drafter itself, so that engines can share it, and the same run drafts the same again.

    Args:
        drafter: the drafter, with options under which it drafts on short texts.
        target: the target to draft for; a ``ToyTarget`` by default.

    Raises:
        AssertionError: it breaks the contract; the message states how.
        OutpaceError: it does not fit the target.
    """
    _check_options(drafter)
    check = _Check(drafter, target or _toy())
    for params in _PARAMS:
        check.tokens(check.prompts, params)
        check.unchanged()
    check.limits()
    check.joining()
    check.budgets()
    check.repeatable()
    if drafter.probabilities:
        check.distributions()
    check.unchanged()


@lru_cache(maxsize=1)
def _toy() -> ToyTarget:
    """The default target: one for all checks, whose plain decoding is known."""
    return ToyTarget()


@lru_cache(maxsize=256)
def _plain_toy(prompts: tuple[tuple[int, ...], ...], params: tuple[SamplingParams, ...]) -> list[Generation]:
    return Engine(_toy()).generate(prompts, params)


def _prompts(target: TargetModel) -> list[list[int]]:
    """Prompts without end tokens: a single token, no pattern, a loop, a long loop."""
    legal = [token for token in range(target.vocabulary) if token not in target.eos_token_ids]
    made = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(8), *range(8), *range(3)]]
    longest = None if target.context is None else max(1, target.context // 4)
    return [[legal[token % len(legal)] for token in prompt][:longest] for prompt in made]


def _check_options(drafter: Drafter[Any]) -> None:
    cls = type(drafter)
    assert isinstance(drafter, Drafter), f"{cls.__name__} does not derive from outpace.drafters.Drafter"
    params = cls.__dict__.get("__dataclass_params__")
    assert params is not None and params.frozen, (
        f"{cls.__name__} must be a frozen dataclass: decorate it with @dataclass(frozen=True)"
    )
    assert isinstance(getattr(cls, "paper", None), str), f"{cls.__name__}.paper must name the publication"
    copies: dict[str, Callable[[Any], Any]] = {
        "dataclasses.replace": dataclasses.replace,
        "copy.deepcopy": copy.deepcopy,
        "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    }
    for how, function in copies.items():
        try:
            other = function(drafter)
        except Exception as error:
            raise AssertionError(f"{cls.__name__} does not survive {how}: {error!r}") from error
        assert type(other) is cls, f"{how} makes a {type(other).__name__} of a {cls.__name__}"
        for field in dataclasses.fields(drafter):
            old, new = getattr(drafter, field.name), getattr(other, field.name)
            assert not _plain(old) or old == new, (
                f"{cls.__name__}.{field.name} is {old!r}, but {new!r} after {how}"
            )


def _plain(value: Any) -> bool:
    """True if a value compares by content, unlike a model."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


class _Check:
    """Runs of one drafter on one target, each compared with the expected result."""

    def __init__(self, drafter: Drafter[Any], target: TargetModel) -> None:
        self.drafter = drafter
        self.target = target
        self.name = type(drafter).__name__
        self.prompts = _prompts(target)
        self._before = copy.deepcopy(self._attributes())

    def _attributes(self) -> dict[str, Any]:
        return {name: value if _plain(value) else id(value) for name, value in vars(self.drafter).items()}

    def engine(self, verifier: str = "match", slots: int = 1) -> tuple[Engine, Watch]:
        watch = watch_of(self.drafter, self.target.vocabulary)
        return Engine(self.target, watch, verifier, adaptive=False, slots=slots), watch

    def plain(self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams]) -> list[Generation]:
        each = (params,) * len(prompts) if isinstance(params, SamplingParams) else tuple(params)
        if self.target is _toy():
            return _plain_toy(tuple(map(tuple, prompts)), each)
        return Engine(self.target).generate(prompts, each)

    def same(self, prompt: Seq[int], found: Seq[int], plain: Seq[int], where: str) -> None:
        assert list(found) == list(plain), (
            f"{self.name} changes the tokens {where}, after prompt {list(prompt)}: "
            f"{list(found)} instead of {list(plain)}"
        )

    def unchanged(self) -> None:
        """Check that nothing was written to the drafter."""
        now = self._attributes()
        new = sorted(now.keys() - self._before.keys())
        assert not new, (
            f"{self.name} sets {', '.join(new)} on itself: keep what belongs to a request in its state, and "
            "what belongs to an engine in the value returned by prepare"
        )
        for name, before in self._before.items():
            assert now.get(name) == before, f"{self.name} changes its own option {name}"

    def tokens(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> None:
        """Check that a batch gives the tokens of plain decoding."""
        found = self.engine()[0].generate(prompts, params)
        for prompt, one, plain in zip(prompts, found, self.plain(prompts, params), strict=True):
            self.same(prompt, one.tokens, plain.tokens, f"with {params}")

    def limits(self) -> None:
        """Check limits of a few tokens, and the end of the context."""
        for temperature in (0.0, 1.0):
            few = [SamplingParams(max_new_tokens=n, temperature=temperature, seed=n) for n in range(4)]
            self.tokens(self.prompts, few)
        context = self.target.context
        if context is None or context > 4096:
            return
        loop = self.prompts[3]
        text = [loop[place % len(loop)] for place in range(context)]
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=4, ignore_eos=True)
            self.tokens([text[: max(context - less, 1)] for less in (0, 1, 2, 9)], params)

    def joining(self) -> None:
        """Check sequences that join and leave between steps."""
        params = SamplingParams(max_new_tokens=25, temperature=0.8, seed=5)
        engine, _ = self.engine()
        sequences = [engine.add(self.prompts[0], params), engine.add(self.prompts[1], params)]
        engine.step()
        sequences.append(engine.add(self.prompts[2], params))
        engine.step()
        engine.remove(sequences[0])
        sequences.append(engine.add(self.prompts[3], params))
        while engine.sequences:
            engine.step()
        expected = self.plain(self.prompts, params)
        for prompt, sequence, plain in zip(self.prompts, sequences, expected, strict=True):
            tokens = plain.tokens[: len(sequence.output)] if sequence is sequences[0] else plain.tokens
            sequence.check()
            self.same(prompt, sequence.output, tokens, "when sequences join and leave")

    def budgets(self) -> None:
        """Check steps that use the first nodes of a draft, all or none of it, and steps without a draft."""
        for params in _PARAMS[:2]:
            for budgets in ((0, 1, 0, -1, 64, 2, 64, -1, 64, 0, 5), (64, 64, 64, 64, 64, 64, 0)):
                watch = watch_of(self.drafter, self.target.vocabulary)
                engine = Engine(self.target, watch, adaptive=Budgets(cycle(budgets)))
                found = engine.generate(self.prompts, params)
                for prompt, one, plain in zip(
                    self.prompts, found, self.plain(self.prompts, params), strict=True
                ):
                    self.same(
                        prompt, one.tokens, plain.tokens, f"in steps with budgets {budgets}, with {params}"
                    )

    def repeatable(self) -> None:
        """Check that a repeated run drafts the same, also while another engine uses the drafter in turns."""
        params = SamplingParams(max_new_tokens=25, temperature=0.8, seed=6)
        seen = []
        for beside in (False, False, True):
            engine, watch = self.engine()
            other, _ = self.engine()
            for prompt in self.prompts:
                engine.add(prompt, params)
                if beside:
                    other.add(prompt[::-1], SamplingParams(max_new_tokens=28, temperature=1.2, seed=7))
            while engine.sequences:
                engine.step()
                other.step()
            seen.append(watch.shapes())
        assert seen[0] == seen[1], f"{self.name} drafts differently when the same run is repeated"
        assert seen[0] == seen[2], (
            f"{self.name} drafts differently while another engine uses it: it keeps state outside the "
            "request's state and the value returned by prepare"
        )

    def distributions(self) -> None:
        """Check that tokens follow the stated distributions, and that rejection preserves the target's."""
        prompt = self.prompts[1]
        # Some drafters draft only from the second step on, so the first two tokens are checked.
        params = [SamplingParams(max_new_tokens=4, temperature=1.0, seed=seed) for seed in range(_SEEDS)]
        engine, watch = self.engine("rejection", _SEEDS)
        output = engine.generate([prompt] * _SEEDS, params)
        tokens, given = [], []
        for draft in next((step for step in watch.seen if any(d.distributions for d in step)), []):
            if draft.distributions:
                tokens.append(draft.tokens[0])
                given.append(draft.distributions[-1].double().cpu())
        if given:
            _compare(tokens, torch.stack(given).sum(dim=0), f"{self.name} drafts")
        for place in (0, 1):
            told = [generation.tokens for generation in output if len(generation.tokens) > place]
            expected = self._expected(prompt, [tuple(tokens[:place]) for tokens in told])
            emitted = [tokens[place] for tokens in told]
            _compare(emitted, expected, f"with the rejection verifier and {self.name} the engine emits")

    def _expected(self, prompt: list[int], outputs: list[tuple[int, ...]]) -> Tensor:
        """Expected counts [vocabulary] of the next token, summed over outputs that follow the prompt."""
        found = torch.zeros(self.target.vocabulary, dtype=torch.float64)
        for output, count in Counter(outputs).items():
            text = [*prompt, *output]
            cache = self.target.new_cache(1, len(text))
            slot = cache.allocate()
            logits = self.target.forward(cache, Batch.of({slot: text})).logits_of(slot)
            found += count * logits[-1].double().softmax(dim=-1).cpu()
        return found


def _compare(tokens: Seq[int], expected: Tensor, what: str) -> None:
    """A chi-squared test of tokens against expected counts, shape [vocabulary]."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    order = expected.argsort(descending=True)
    cells: list[list[float]] = []  # observed and expected, at least 5 expected in each
    for seen, due in zip(counts[order].tolist(), expected[order].tolist(), strict=True):
        if not cells or cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen
        cells[-1][1] += due
    if len(cells) > 1 and cells[-1][1] < 5:
        seen, due = cells.pop()
        cells[-1][0] += seen
        cells[-1][1] += due
    freedom = len(cells) - 1
    if not freedom:
        return
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    # Wilson and Hilferty 1931: the cube root is close to normal.
    spread = 2 / (9 * freedom)
    deviations = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    assert deviations < _FAR, (
        f"{what} tokens that do not follow their distribution: chi-squared {statistic:.1f} with {freedom} "
        f"degrees of freedom over {len(tokens)} draws"
    )


class _Untaken(DraftPlan):
    """A plan whose drafts do not pay once they are seen."""

    def take(self, draft: Draft) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Budgets:
    """A policy that plans given numbers of nodes; -1 is a draft of one node that is not taken."""

    budgets: Iterator[int]
    timed: bool = False

    def plan(self, batch: int) -> DraftPlan:
        nodes = next(self.budgets)
        return DraftPlan(nodes) if nodes >= 0 else _Untaken(1)

    def learn(self, outcome: Outcome) -> None:
        pass
