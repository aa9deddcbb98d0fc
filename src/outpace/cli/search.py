"""``outpace search``: the layers that ``self_speculative`` had best skip, on a user's own prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, cast, get_args

from outpace.cli import progress, screen
from outpace.cli.interrupt import Interrupt
from outpace.core import OutpaceError, SamplingParams
from outpace.loading import Loaded
from outpace.train import data, hub
from outpace.train.skipping import Measure, SkippedLayers, find_skipped_layers


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched for, and how.

    Attributes:
        trials: sets of layers to try.
        num_speculative_tokens: tokens that ``self_speculative`` drafts.
        measure: what a set is judged by, "counts" or "seconds".
        prompts: of the data, so many at most, the first ones.
        seed: of the search.
    """

    trials: int
    num_speculative_tokens: int
    measure: str
    prompts: int
    seed: int

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise OutpaceError(f"--measure is counts or seconds, not {self.measure!r}")


def run(
    model: Loaded, source: str, chat: bool, params: SamplingParams, search: Search, out: Path | None
) -> tuple[dict[str, Any], bool]:
    """Search; what was found, and whether the search ran to its end. The best so far is there if not.

    Raises:
        KeyboardInterrupt: it was interrupted before anything was found.
    """
    prompts = _prompts(model, source, chat, search.prompts)
    best: SkippedLayers | None = None
    with Interrupt() as interrupt, progress.bar(search.trials, "trials") as bar:

        def report(number: int, found: SkippedLayers | None) -> None:
            nonlocal best
            best = found
            bar.advance("" if found is None else f"best so far: skip {_spelled(found)}")

        try:
            best = find_skipped_layers(
                model.target,
                prompts,
                params,
                num_speculative_tokens=search.num_speculative_tokens,
                trials=search.trials,
                measure=cast(Measure, search.measure),
                seed=search.seed,
                report=report,
                stop=lambda: interrupt.raised,
            )
        except OutpaceError:
            if interrupt.raised and best is None:
                raise KeyboardInterrupt from None
            raise
    if out is not None:
        best.save(out)
    skip = str(out) if out is not None else _spelled(best)
    drafter = f"self_speculative:skip={skip},num_speculative_tokens={search.num_speculative_tokens}"
    found = {**dataclasses.asdict(best), "prompts": len(prompts), "drafter": drafter}
    return found, not interrupt.raised


def _spelled(found: SkippedLayers) -> str:
    return "+".join(map(str, found.skip))


def _prompts(model: Loaded, source: str, chat: bool, most: int) -> Seq[Seq[int]]:
    """The first prompts of the data that leave room for an answer; a text without one is a prompt."""
    read = hub.read if source.startswith(hub.PREFIX) else data.read
    documents = read(source, model, chat)
    given = [document.tokens[: document.prompt] or document.tokens for document in documents]
    context = model.target.context
    fits = [prompt for prompt in given if context is None or len(prompt) < context]
    if len(fits) < len(given):
        screen.note(
            f"left out, as long as the model's context of {context}: {len(given) - len(fits)} prompts"
        )
    if not fits:
        raise OutpaceError(f"no prompt in {source} fits the model's context of {context}; give shorter ones")
    return fits[:most]
