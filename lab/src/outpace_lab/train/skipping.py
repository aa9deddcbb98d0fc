"""Search for the layers that ``self_speculative`` skips, on given prompts (Zhang et al. 2023, section 3).

The paper minimises the time per token by Bayesian optimisation. Here the sampler is optuna's tree-structured
Parzen estimator (Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization), and the objective is by
default the speed predicted from counts, which is the same in every run, or optionally the measured speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outpace.core import Generation, OutpaceError, SamplingParams, load_extra
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace_lab.drafters.layers.self_speculative import SelfSpeculative
from outpace_lab.names import MEASURES, Measure


@dataclass(frozen=True)
class SkippedLayers:
    """The result of a search; ``self_speculative:skip=FILE`` reads the file that ``save`` writes.

    Attributes:
        skip: the layers to skip, ascending.
        layers: the number of layers of the target.
        speed: of the best set: relative to plain decoding by counts, or in tokens per second.
        mean_accepted_length: tokens per step with the best set.
        trials: the number of sets tried.
    """

    skip: tuple[int, ...]
    layers: int
    speed: float
    mean_accepted_length: float
    trials: int

    def save(self, file: str | Path) -> None:
        """Write a JSON file; its name must end in ``.json``, as ``self_speculative`` requires."""
        path = Path(file)
        if path.suffix != ".json":
            raise OutpaceError(f"the name of a file of layers to skip must end in .json, not {str(path)!r}")
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def find_skipped_layers(
    target: Any,
    prompts: Seq[Seq[int]],
    params: SamplingParams | None = None,
    *,
    num_speculative_tokens: int = 4,
    trials: int = 100,
    measure: Measure = "counts",
    seed: int = 0,
    report: Callable[[int, SkippedLayers | None], None] = lambda number, best: None,
    stop: Callable[[], bool] = lambda: False,
) -> SkippedLayers:
    """Search for the best set of layers for ``self_speculative`` to skip.

    Args:
        target: a loaded transformers model, or a target.
        prompts: token ids, at least one per prompt; typical of those to be decoded.
        params: how to decode them; by default greedy, 128 tokens. Give a seed when sampling.
        num_speculative_tokens: the option of ``self_speculative`` to search for.
        trials: the number of sets of layers to try, at least 1.
        measure: "counts": tokens per forward of the target, with the layers run for drafts counted in; the
            same in every run. "seconds": tokens per second, measured on this machine.
        seed: of the search.
        report: called after each trial with its number, from 1, and the best result so far, if any.
        stop: called before each decoding step; when it returns True the search ends with the best result so
            far.

    Raises:
        OutpaceError: optuna is missing, an argument is invalid, or no trial finished.
        UnsupportedModel: the target is not a plain stack of layers.
    """
    optuna = load_extra("optuna", "the search for layers to skip", "search", "outpace-lab")
    if not prompts or trials < 1 or measure not in MEASURES:
        raise OutpaceError(
            "the search needs prompts, trials of at least 1, and measure 'counts' or 'seconds'"
        )
    model = Target(target)
    layers = model.layers
    if layers < 2:
        raise OutpaceError("the target has a single layer, and at least one must be kept")
    model.some_layers([0])  # raises if the target cannot run some of its layers
    tried: dict[tuple[int, ...], SkippedLayers] = {}

    def run(trial: Any) -> float:
        chosen = [trial.suggest_categorical(f"skip {layer}", [False, True]) for layer in range(layers)]
        skip = tuple(layer for layer, skipped in enumerate(chosen) if skipped)
        if not 0 < len(skip) < layers:
            return 0.0
        if skip not in tried:
            engine = Engine(model, SelfSpeculative(skip, num_speculative_tokens), adaptive=False)
            found = _decode(engine, prompts, params, stop)
            if found is None:
                raise optuna.TrialPruned
            tried[skip] = _judge(found, skip, layers, measure)
        return tried[skip].speed

    def tell(study: Any, trial: Any) -> None:
        if stop():
            study.stop()
        else:
            report(trial.number + 1, _best(tried) if tried else None)

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # below that it logs errors with their traceback
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        # The first guess: every other layer between the first and the last, like the sets found in the paper.
        for first in (range(1, layers - 1, 2), [layers // 2]):
            study.enqueue_trial({f"skip {layer}": layer in first for layer in range(layers)})
        study.optimize(run, n_trials=trials, callbacks=[tell])
    finally:
        optuna.logging.set_verbosity(before)
    if not tried:
        raise OutpaceError("no trial finished; let the search run longer, or give more trials")
    return _best(tried)


def _decode(
    engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams | None, stop: Callable[[], bool]
) -> list[Generation] | None:
    """Decode the prompts together; None if stopped."""
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.sequences:
        if stop():
            return None
        engine.step()
    for sequence in sequences:
        sequence.check()
    return [sequence.generation() for sequence in sequences]


def _best(tried: dict[tuple[int, ...], SkippedLayers]) -> SkippedLayers:
    best = max(tried.values(), key=lambda result: (result.speed, len(result.skip)))
    return SkippedLayers(best.skip, best.layers, best.speed, best.mean_accepted_length, len(tried))


def _judge(found: Seq[Generation], skip: tuple[int, ...], layers: int, measure: Measure) -> SkippedLayers:
    """The speed of decoding with a set of skipped layers.

    By counts a step costs one forward of the target, whatever its width, and each drafted token the fraction
    of the layers that it runs: the model of Leviathan et al. 2023, section 3.3, with acceptance counted, not
    assumed.
    """
    tokens = sum(generation.stats.tokens for generation in found)
    steps = sum(generation.stats.steps for generation in found)
    if not tokens:
        raise OutpaceError("nothing was decoded: allow new tokens, and give prompts shorter than the context")
    if measure == "seconds":
        # The prompts ran as one batch, and each was charged the whole wall time of its steps.
        cost = max(generation.stats.seconds_decode for generation in found)
    else:
        drafted = sum(generation.stats.drafted for generation in found)
        cost = steps + drafted * (layers - len(skip)) / layers
    return SkippedLayers(skip, layers, tokens / cost, tokens / steps, 1)
