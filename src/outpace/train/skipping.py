"""Which layers ``self_speculative`` skips: a search on the user's own prompts (Zhang et al. 2023, section 3).

The paper's search is Bayesian optimisation of the time per token; here the sampler is optuna's
tree-structured Parzen estimator (Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization), and what
is maximised is by default the speed that counts predict, the same in every run, or else the measured one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from outpace.core import Generation, OutpaceError, SamplingParams
from outpace.drafters.layers.self_speculative import SelfSpeculative
from outpace.engine.engine import Engine
from outpace.targets import Target

Measure = Literal["counts", "seconds"]


@dataclass(frozen=True)
class SkippedLayers:
    """What a search found; ``self_speculative:skip=FILE`` reads the file that ``save`` writes.

    Attributes:
        skip: the layers to leave out, ascending.
        layers: how many the target has.
        speed: of the best set: relative to plain decoding by counts, or tokens a second.
        mean_accepted_length: tokens a step with it.
        trials: sets that were tried.
    """

    skip: tuple[int, ...]
    layers: int
    speed: float
    mean_accepted_length: float
    trials: int

    def save(self, file: str | Path) -> None:
        """Write a JSON file; its name must end in ``.json``, as ``self_speculative`` tells files by it."""
        path = Path(file)
        if path.suffix != ".json":
            raise OutpaceError(f"a file of layers to skip is named .json, not {str(path)!r}")
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def find_skipped_layers(
    target: Any,
    prompts: Seq[Seq[int]],
    params: SamplingParams | None = None,
    *,
    num_draft_tokens: int = 4,
    trials: int = 100,
    measure: Measure = "counts",
    seed: int = 0,
    report: Callable[[int, SkippedLayers | None], None] = lambda number, best: None,
    stop: Callable[[], bool] = lambda: False,
) -> SkippedLayers:
    """Search for the layers that ``self_speculative`` had best skip.

    Args:
        target: a loaded transformers model, or a target.
        prompts: token ids, each prompt at least one; like those that are to be decoded.
        params: how to decode them; greedy, 128 tokens, by default. A sampled search should have a seed.
        num_draft_tokens: the option of ``self_speculative`` to search for.
        trials: sets of layers to try, at least 1.
        measure: "counts": tokens for each forward's worth of layers, of the target and of drafts; the same in
            every run. "seconds": tokens a second, on this machine as it is.
        seed: of the search.
        report: called after each trial with its number, from 1, and the best so far, if there is one.
        stop: asked before each step of decoding; once it says so, the search ends with the best so far.

    Raises:
        OutpaceError: optuna is missing; or an argument that means nothing; or no set was tried to its end.
        UnsupportedModel: the target is no plain stack of layers.
    """
    optuna = _optuna()
    if not prompts or trials < 1 or measure not in get_args(Measure):
        raise OutpaceError(
            "the search needs prompts, trials of at least 1, and measure 'counts' or 'seconds'"
        )
    model = Target(target)
    layers = model.layers
    if layers < 2:
        raise OutpaceError("the target has a single layer, and at least one must stay")
    model.some_layers([0])  # says so where it has no part
    tried: dict[tuple[int, ...], SkippedLayers] = {}

    def run(trial: Any) -> float:
        chosen = [trial.suggest_categorical(f"skip {layer}", [False, True]) for layer in range(layers)]
        skip = tuple(layer for layer, skipped in enumerate(chosen) if skipped)
        if not 0 < len(skip) < layers:
            return 0.0
        if skip not in tried:
            engine = Engine(model, SelfSpeculative(skip, num_draft_tokens), adaptive=False)
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
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # else an error is logged with its traceback
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        # Where nothing is known, every other layer but the first and the last, as the paper's results look.
        for first in (range(1, layers - 1, 2), [layers // 2]):
            study.enqueue_trial({f"skip {layer}": layer in first for layer in range(layers)})
        study.optimize(run, n_trials=trials, callbacks=[tell])
    finally:
        optuna.logging.set_verbosity(before)
    if not tried:
        raise OutpaceError(
            "no set of layers was tried to its end; let the search run on, or give more trials"
        )
    return _best(tried)


def _decode(
    engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams | None, stop: Callable[[], bool]
) -> list[Generation] | None:
    """The prompts, decoded together; None if that was stopped."""
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.sequences:
        if stop():
            return None
        engine.step()
    return [sequence.generation() for sequence in sequences]


def _best(tried: dict[tuple[int, ...], SkippedLayers]) -> SkippedLayers:
    best = max(tried.values(), key=lambda result: (result.speed, len(result.skip)))
    return SkippedLayers(best.skip, best.layers, best.speed, best.mean_accepted_length, len(tried))


def _judge(found: Seq[Generation], skip: tuple[int, ...], layers: int, measure: Measure) -> SkippedLayers:
    """How fast a set of layers is.

    A step costs one target's worth of layers, whatever its width, and each drafted token the share that was
    kept: the model of Leviathan et al. 2023, section 3.3, with acceptance counted, not assumed.
    """
    tokens = sum(generation.stats.tokens for generation in found)
    steps = sum(generation.stats.steps for generation in found)
    if not tokens:
        raise OutpaceError("nothing was decoded: allow new tokens, and give prompts shorter than the context")
    if measure == "seconds":
        # The prompts run as one batch: the wall time of a step counts for each that took part in it.
        cost = max(generation.stats.seconds_decode for generation in found)
    else:
        drafted = sum(generation.stats.drafted for generation in found)
        cost = steps + drafted * (layers - len(skip)) / layers
    return SkippedLayers(skip, layers, tokens / cost, tokens / steps, 1)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise OutpaceError(
            "the search for layers to skip needs optuna: pip install 'outpace[search]'"
        ) from error
    return optuna
