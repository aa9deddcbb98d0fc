"""The training loop for any learned method, written against ``Trained`` alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.draws.noise import key
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace_lab.train.boosting import fingerprint
from outpace_lab.train.checkpoint import Checkpoints
from outpace_lab.train.data import digest
from outpace_lab.train.feed import Feed, Row
from outpace_lab.train.log import LOG, Log
from outpace_lab.train.metric import evaluate
from outpace_lab.train.objectives import objective
from outpace_lab.train.on_policy import is_on_policy
from outpace_lab.train.processes import Processes
from outpace_lab.train.states import KeptStates
from outpace_lab.train.trained import Trained
from outpace_lab.train.update import means, update


@dataclass(frozen=True)
class Training:
    """Options of training a module.

    Attributes:
        steps: updates of the weights.
        rows: packed rows per forward, on each device.
        accumulate: forwards per update.
        learning_rate: the peak; the rate rises linearly over the fraction ``warmup`` of the steps, then falls
            to a tenth along a cosine.
        weight_decay: of AdamW.
        clip: the maximum norm of the gradients.
        objective: a name in ``outpace_lab.train.objectives``.
        bf16: run the module's forwards in bfloat16; its weights stay float32.
        evaluate_every: steps between measurements on the held-out rows; each also writes a checkpoint.
        patience: stop after this many consecutive measurements without a longer expected length; 0 for never.
            The first measurement is made before the first step.
        seed: of the order of the rows, and of text written by the module.
        on_policy: the fraction of forwards, in [0, 1], whose text after the prompts is the module's own.
    """

    steps: int = 1000
    rows: int = 4
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    objective: str = "ground_truth"
    bf16: bool = False
    evaluate_every: int = 100
    patience: int = 0
    seed: int = 0
    on_policy: float = 0.0

    def __post_init__(self) -> None:
        check_least("training", self, steps=1, rows=1, accumulate=1, evaluate_every=1, patience=0)
        if not 0 < self.learning_rate < math.inf or not 0 <= self.warmup < 1:
            raise OutpaceError("training: learning_rate must be above 0, and warmup in [0, 1)")
        if not 0 <= self.on_policy <= 1:
            raise OutpaceError(f"on_policy must be a fraction from 0 to 1, not {self.on_policy}")
        objective(self.objective)

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps are numbered from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        way = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))


@dataclass
class Progress:
    """The progress of a run, part of its checkpoint.

    Attributes:
        step: updates made.
        best: the greatest expected length so far.
        waited: measurements since then.
        measured: the figures measured then.
        seconds, cpu_seconds: wall and processor time of this process up to the checkpoint, resumed runs
            included.
    """

    step: int = 0
    best: float = 0.0
    waited: int = 0
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def train(
    module: Trained,
    rows: Seq[Row],
    held_out: Seq[Row],
    settings: Training,
    out: Path,
    report: Callable[[Mapping[str, Any]], None] = lambda entry: None,
    earlier: Seq[Trained] = (),
    calibration: Seq[Row] = (),
    kept: KeptStates | None = None,
) -> Progress:
    """Train a module on packed rows and write the weights with the best held-out expected length to ``out``.

    If ``out`` contains a checkpoint, the run resumes from it and ends with the weights of an uninterrupted
    run: the order of the rows depends on seed and step alone, and each step reseeds torch.

    If a launcher started several processes, each of which calls this function, they share the rows of each
    forward, and the first one writes.

    Args:
        module: bound to its target.
        report: called with each entry of the log, ``log.jsonl`` in ``out``, in each process.
        earlier: drafters that the module will draft together with. It learns the places that they get wrong,
            and the expected length is that of all of them together.
        calibration: rows on which a module measures the accuracies it drafts by, such as that of each head;
            neither learnt nor held out. Required by modules with heads.
        kept: where the target's states are kept, so that it is run once per row.

    Raises:
        OutpaceError: accelerate is missing, the checkpoint belongs to other data or settings, the settings do
            not fit the module, or a loss is infinite or NaN; the last checkpoint is kept in that case.
    """
    _check(module, rows, held_out, settings, earlier)
    goal = objective(settings.objective)
    processes = Processes(module.target.hidden.device)
    accelerator = _accelerator(module.target, settings)
    module.suit(_learnt(rows, module.target.vocabulary))
    groups = [{"params": weights, "relative": rate} for rate, weights in module.groups()]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    # Module and optimizer are on the target's device already. In a single process accelerate would move them
    # to the first GPU.
    prepared, optimizer = accelerator.prepare(module, optimizer, device_placement=[False, False])
    signature = _signature(module, rows, settings, earlier) | {"number of processes": processes.count}
    checkpoints = Checkpoints(out, accelerator, signature)
    progress = Progress(**checkpoints.load())
    began, began_cpu = time.perf_counter() - progress.seconds, time.process_time() - progress.cpu_seconds
    log = Log(out / LOG, progress.step, report, processes.first)
    shared = settings.rows, settings.seed, settings.on_policy, earlier, processes.index, processes.count
    feed = Feed(module, rows, *shared, kept)
    if progress.step == 0:
        module.begin_linearly(feed.each(rows))
        # Measured and saved before the first step: a trained module may not improve any further.
        log.write(_measure(feed, held_out, calibration, settings, progress, processes))
        if processes.first:
            module.save(out)
    while progress.step < settings.steps and not (settings.patience and progress.waited >= settings.patience):
        torch.manual_seed(key(settings.seed, progress.step, processes.index))
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(progress.step) * group["relative"]
        module.at_step(progress.step, settings.steps)
        forwards = range(progress.step * settings.accumulate, (progress.step + 1) * settings.accumulate)
        batches = (feed.batch(forward) for forward in forwards)
        parts = update(prepared, optimizer, accelerator, batches, goal, settings.clip, settings.bf16)
        own = sum(is_on_policy(forward, settings.on_policy) for forward in forwards) / len(forwards)
        entry = {"step": progress.step + 1, **means(parts, accelerator)}
        log.write(entry | {"learning_rate": settings.rate(progress.step), "on_policy": own})
        progress.step += 1
        if progress.step % settings.evaluate_every == 0 or progress.step == settings.steps:
            log.write(_measure(feed, held_out, calibration, settings, progress, processes))
            if progress.waited == 0 and processes.first:
                module.save(out)
            progress.seconds = time.perf_counter() - began
            progress.cpu_seconds = time.process_time() - began_cpu
            checkpoints.save(asdict(progress))
    return progress


def _check(
    module: Trained, rows: Seq[Row], held_out: Seq[Row], settings: Training, earlier: Seq[Trained]
) -> None:
    """Check that the module can be trained with these rows and settings.

    Raises:
        OutpaceError: it cannot; the message gives the reason.
    """
    for part, what in ((rows, "learn"), (held_out, "measure on")):
        if not any(len(document.tokens) > max(document.prompt, 1) for row in part for document in row):
            raise OutpaceError(
                f"there is nothing to {what}: no text is longer than its prompt; give more, or longer rows"
            )
    tokens = {token for row in (*rows, *held_out) for document in row for token in document.tokens}
    if not all(0 <= token < module.target.vocabulary for token in (min(tokens), max(tokens))):
        raise OutpaceError(
            f"the texts have token ids from {min(tokens)} to {max(tokens)}, and the target has "
            f"{module.target.vocabulary}; give texts tokenized for the target"
        )
    if settings.on_policy:
        _ = module.writer  # raises if the module cannot write text
        if earlier:
            raise OutpaceError(
                "the mistakes of earlier drafters are measured on the target's text, not on a drafter's own: "
                "leave out on_policy, or the earlier drafters"
            )
    longest = max(len(document.tokens) for row in (*rows, *held_out) for document in row)
    if module.context is not None and longest > module.context:
        raise OutpaceError(
            f"{module.method}: a text has {longest} tokens, more than the drafter's context of "
            f"{module.context}; pack shorter rows"
        )


def _learnt(rows: Seq[Row], vocabulary: int) -> Tensor:
    """Number of times that each token is to be learnt, [vocabulary]."""
    tokens = [token for row in rows for document in row for token in document.tokens[document.prompt :]]
    return torch.tensor(tokens, dtype=torch.long).bincount(minlength=vocabulary)


def _accelerator(target: TargetModel, settings: Training) -> Any:
    from accelerate import Accelerator

    return Accelerator(
        cpu=target.hidden.device.type == "cpu",
        mixed_precision="no",  # see update
        gradient_accumulation_steps=settings.accumulate,
        step_scheduler_with_optimizer=False,
    )


def _signature(module: Trained, rows: Seq[Row], settings: Training, earlier: Seq[Trained]) -> dict[str, Any]:
    """Facts that must be equal for a run to resume from a checkpoint."""
    return {
        "method": module.method,
        "config": asdict(module.config),
        "target": asdict(module.fit) | {"dtype": str(module.target.hidden.dtype)},
        "rows": len(rows),
        "texts": digest([document for row in rows for document in row]),
        "settings": asdict(settings),
        "earlier drafters": [fingerprint(drafter) for drafter in earlier],
    }


def _measure(
    feed: Feed,
    held_out: Seq[Row],
    calibration: Seq[Row],
    settings: Training,
    progress: Progress,
    processes: Processes,
) -> dict[str, Any]:
    """Measure the module on held-out text, and record in ``progress`` whether it improved."""
    module = feed.module
    module.eval()
    module.calibrate(feed.each(calibration))
    replay, loss = evaluate(module, feed.each(held_out), objective(settings.objective), feed.earlier)
    module.train()
    own: dict[str, Any] = {
        "held_out_loss": loss,
        "expected_length": replay.expected_length,
        "accepted_per_position": replay.acceptance,
        **module.figures(feed.each(held_out)),
    }
    # Devices may differ in the last digits, but all must stop at the same step.
    found = processes.agree(own)
    length = float(found["expected_length"])
    if length > progress.best:
        progress.best, progress.waited, progress.measured = length, 0, found
    else:
        progress.waited += 1
    return {"step": progress.step, **found}
