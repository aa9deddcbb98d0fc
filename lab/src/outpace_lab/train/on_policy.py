"""On-policy distillation: the drafter continues the prompts, and the target scores the text.

Agarwal et al. 2023, On-Policy Distillation of Language Models (GKD), arXiv 2306.13649, algorithm 1; for
drafters Zhou et al. 2023, DistillSpec, arXiv 2310.08461. The text is sampled at temperature 1 from the
drafter as of this step, so it learns the target's predictions after its own mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outpace.core import SamplingParams
from outpace.draws.noise import key
from outpace.engine.engine import Engine
from outpace_lab.train.data import Document
from outpace_lab.train.trained import Trained


def is_on_policy(forward: int, fraction: float) -> bool:
    """True if a forward, numbered from 0, reads the drafter's own text: a fraction of them, evenly spaced."""
    return int((forward + 1) * fraction) > int(forward * fraction)


def own_text(module: Trained, rows: Seq[Seq[Document]], seed: int) -> list[list[Document]]:
    """Replace the text after each document's prompt by the drafter's own.

    The first half of a text without a prompt is its prompt. No text becomes longer than it was, so that rows
    keep their length; the drafter may end it earlier.

    Args:
        seed: of the noise of all rows together.

    Raises:
        OutpaceError: the module's method cannot write text.
    """
    found = [list(row) for row in rows]
    places = [(at, place) for at, row in enumerate(rows) for place, d in enumerate(row) if len(d.tokens) > 1]
    prompts = [rows[at][place].asked for at, place in places]
    params = [
        SamplingParams(len(rows[at][place].tokens) - len(prompt), 1.0, seed=key(seed, at, place))
        for (at, place), prompt in zip(places, prompts, strict=True)
    ]
    training = module.training
    module.eval()
    # Without a drafter: a governed one would make the widths of the forwards, and so the last digits, depend
    # on the clock, and an interrupted run would end with other weights.
    generations = Engine(module.writer).generate(prompts, params)
    module.train(training)
    for (at, place), prompt, generation in zip(places, prompts, generations, strict=True):
        document = found[at][place]
        found[at][place] = replace(document, tokens=(*prompt, *generation.tokens), prompt=len(prompt))
    return found
