"""Governed drafters on recorded texts at the step times of other machines: no model runs, and no clock.

    python lab/measure/replayed.py --data DIR [--drafters "suffix;prompt_lookup"] [--tokens 64]

First the embedded model decodes prompts of five sets plainly. Then each text is decoded again as if it were
dictated: drafts are proposed, cut by the governor and compared with the text, and a step takes the recorded
seconds of a forward of that width (``STEPS``), with seeded jitter, and ``--drafting`` where something was
drafted. One governor sees all texts of a run; the order of the sets is another in each of ``--runs`` runs.
Drafters that read logits cannot be replayed.

Printed, relative to plain decoding: all texts together, each set, and the slowest text and tenth of texts;
then the same with the number of nodes that is best in hindsight at each step, which no governor can reach.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.suites import load_suite
from outpace.core import Draft, SamplingParams
from outpace.drafters import load_drafter
from outpace.draws.noise import Key
from outpace.engine.active import Drafting
from outpace.engine.parts import policy_of
from outpace.policy.governor import Governor
from outpace.policy.plan import Outcome
from outpace.sequence import Sequence
from outpace.testing import ToyTarget
from outpace.tree import children, select
from outpace.verify import load_verifier

SUITES = ("gsm8k", "humaneval", "rewriting", "retrieval", "mt_bench")
LONGEST = 700  # tokens of a prompt
# Milliseconds of a plain step, and plain steps that forwards of more rows take: growths of the embedded model
# in llama.cpp with two threads (two measurements of 0.1 billion parameters in q8_0), and SmolLM2-135M in
# bfloat16 on one core of an AMD EPYC with AVX-512.
STEPS = {
    "0.1b q4_0": (3.0, {1: 1, 2: 2.3, 4: 2.8, 8: 4.8, 16: 7.4, 32: 13.0}),
    "0.1b q8_0": (6.2, {1: 1, 2: 2.9, 4: 3.7, 8: 4.6, 16: 7.2, 32: 12.5}),
    "0.5b q4_0": (14.0, {1: 1, 2: 1.9, 4: 3.4, 8: 5.5, 16: 8.9, 32: 16.0}),
    "0.5b q8_0": (25.0, {1: 1, 2: 2.0, 4: 2.4, 8: 3.5, 16: 5.6, 32: 10.0}),
    "smollm2": (15.0, {1: 1, 4: 1.18, 8: 1.42, 16: 2.3, 32: 4.1}),
}
WIDTHS = (1, 3, 7, 15, 31)  # of drafts in hindsight
JITTER = 0.05  # mean of what a step takes more than recorded, as a share

Texts = dict[str, list[tuple[list[int], list[int]]]]  # set -> prompts and what follows them


class Steps:
    """Seconds of forwards by rows; those of up to 16 rows take as long as the next recorded number."""

    def __init__(self, name: str, seed: int) -> None:
        self.plain, self.shares = STEPS[name][0] / 1e3, STEPS[name][1]
        self._noise = random.Random(seed)

    def seconds_at(self, rows: int) -> float:
        known = sorted(self.shares)
        above = known[min(bisect_left(known, rows), len(known) - 1)]
        if rows <= 16 or rows >= above:
            return self.plain * self.shares[above] * max(1.0, rows / above)
        below = known[known.index(above) - 1]
        part = (rows - below) / (above - below)
        return self.plain * (self.shares[below] + part * (self.shares[above] - self.shares[below]))

    def taken(self, rows: int) -> float:
        return self.seconds_at(rows) * (1 + JITTER * abs(self._noise.gauss(0, 1)))


def record(data: Path | None, limit: int, tokens: int) -> Texts:
    """Decode the first prompts of each set plainly with the embedded model."""
    path = outpace.nano_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = outpace.Engine(AutoModelForCausalLM.from_pretrained(path).eval())
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    found: Texts = {}
    for suite in SUITES:
        texts = [item.turns[0] for item in load_suite(suite, data).items if item.turns]
        prompts = [ids for ids in (tokenizer(text).input_ids for text in texts) if len(ids) < LONGEST][:limit]
        found[suite] = [
            (prompt, list(one.tokens))
            for prompt, one in zip(prompts, engine.generate(prompts, params), strict=True)
        ]
    return found


def right(draft: Draft, text: list[int], start: int) -> list[int]:
    """The nodes of a draft that a text goes through from its token at ``start`` on."""
    below, path = children(draft.parents), []
    for token in text[start:]:
        path.append(
            next((node for node in below[path[-1] if path else -1] if draft.tokens[node] == token), -1)
        )
        if path[-1] < 0:
            return path[:-1]
    return path


class Replay:
    """A drafter that decodes dictated texts, at recorded step times."""

    def __init__(self, spec: str, steps: Steps, drafting: float) -> None:
        self.steps, self.seconds = steps, drafting
        drafter, target = load_drafter(spec), ToyTarget(context=None)
        policy = policy_of("auto", drafter, load_verifier("match"), target)
        assert isinstance(policy, Governor)
        policy.begin_with(
            {"verify": {"1": [(rows, steps.seconds_at(rows)) for rows in sorted(steps.shares)]}}
        )
        self.policy, self.drafting = policy, Drafting(drafter, policy, target)

    def decode(
        self, prompt: list[int], text: list[int], step: Callable[[Any, list[int]], tuple[Any, ...]]
    ) -> float:
        """Seconds of a text; ``step`` returns a draft, its accepted nodes and the seconds of the step."""
        params = SamplingParams(max_new_tokens=len(text), ignore_eos=True)
        sequence = Sequence(prompt, params, Key(0), limit=len(text), eos_token_ids=frozenset())
        active: Any = Active(sequence, self.drafting.drafter.start(sequence, self.drafting.shared))
        total = 0.0
        while sequence.output_length < len(text):
            draft, path, seconds = step(active, text)
            tokens = text[sequence.output_length :][: len(path) + 1]
            for token in tokens:
                sequence.append(token)
            seen: Any = SimpleNamespace(draft=draft, path=path, tokens=tokens, kept=range(len(draft)))
            self.drafting.observe({active: seen})
            total += seconds
        self.drafting.drafter.stop(active.state)
        return total

    def governed(self, active: Any, text: list[int]) -> tuple[Draft, list[int], float]:
        self.drafting.decide([active])
        draft = self.drafting.propose([active])[active]
        plan = self.drafting.plan
        assert plan is not None
        draft = select(draft, range(self.drafting.nodes(active, draft)))
        path = right(draft, text, active.sequence.output_length)
        drafting, verifying = self.seconds if plan.nodes else 0.0, self.steps.taken(1 + len(draft))
        stated = sum(draft.chances or ())
        self.policy.learn(Outcome(plan, [len(draft)], [path], drafting, verifying, None, stated))
        return draft, path, drafting + verifying

    def hindsight(self, active: Any, text: list[int]) -> tuple[Draft, list[int], float]:
        (draft,) = self.drafting.drafter.propose([active.state])
        path = right(draft, text, active.sequence.output_length)

        def speed(nodes: int) -> float:
            seconds = self.steps.seconds_at(1 + nodes) + (self.seconds if nodes else 0.0)
            return (1 + sum(node < nodes for node in path)) / seconds

        nodes = max((0, *(min(width, len(draft)) for width in WIDTHS)), key=speed)
        path = [node for node in path if node < nodes]
        seconds = self.steps.taken(1 + nodes) + (self.seconds if nodes else 0.0)
        return select(draft, range(nodes)), path, seconds


class Active:
    """A sequence and its drafter's state, as in an engine's batch."""

    def __init__(self, sequence: Sequence, state: Any) -> None:
        self.sequence, self.state = sequence, state


def replay(spec: str, name: str, texts: Texts, runs: int, drafting: float, hindsight: bool) -> str:
    """A line of results; see the module."""
    plain: dict[str, list[float]] = {suite: [] for suite in texts}
    taken: dict[str, list[float]] = {suite: [] for suite in texts}
    for seed in range(runs):
        own = Replay(spec, Steps(name, seed), drafting)
        for suite in random.Random(seed).sample(list(texts), len(texts)):
            for prompt, text in texts[suite]:
                step = own.hindsight if hindsight else own.governed
                taken[suite].append(own.decode(prompt, text, step))
                plain[suite].append(sum(own.steps.taken(1) for _ in text))
    each = sorted(
        one / other for suite in texts for one, other in zip(plain[suite], taken[suite], strict=True)
    )
    whole = sum(map(sum, plain.values())) / sum(map(sum, taken.values()))
    sets = " ".join(f"{sum(plain[suite]) / sum(taken[suite]):5.2f}" for suite in texts)
    tenth = statistics.mean(each[: max(1, len(each) // 10)])
    return f"{whole:5.2f}  {sets}  {each[0]:5.2f} {tenth:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--drafters", default="suffix", help="specs, with ; between them")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per text")
    parser.add_argument("--limit", type=int, default=7, help="texts per set")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--drafting", type=float, default=5e-5, help="seconds of a draft")
    parser.add_argument("--texts", type=Path, help="file of the recorded texts; written if it does not exist")
    given = parser.parse_args()
    if given.texts and given.texts.exists():
        texts: Texts = json.loads(given.texts.read_text(encoding="utf-8"))
    else:
        texts = record(given.data, given.limit, given.tokens)
        if given.texts:
            given.texts.write_text(json.dumps(texts), encoding="utf-8")
    texts = {
        suite: [(prompt, text[: given.tokens]) for prompt, text in rows[: given.limit]]
        for suite, rows in texts.items()
    }
    print(f"{'':42}  all  {' '.join(suite[:5].rjust(5) for suite in texts)}  slowest, tenth")
    for spec in given.drafters.split(";"):
        for name in STEPS:
            for hindsight in (False, True):
                label = f"{spec}, {name}{', in hindsight' if hindsight else ''}"
                print(
                    f"{label:42} {replay(spec, name, texts, given.runs, given.drafting, hindsight)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
