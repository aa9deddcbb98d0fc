"""The training loop, for any learned method: it reads ``Learned`` and has no branch for any."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outpace.core import OutpaceError
from outpace.drafting.learned import Batch, Learned, Losses
from outpace.sampling import key
from outpace.targets.base import TargetModel
from outpace.train.checkpoint import Checkpoints
from outpace.train.data import Document
from outpace.train.metric import evaluate
from outpace.train.objectives import objective
from outpace.train.reading import read_batch

LOG = "log.jsonl"
Row = Seq[Document]


@dataclass(frozen=True)
class Training:
    """How a module is trained.

    Attributes:
        steps: updates of the weights.
        rows: packed rows to a forward, on each device.
        accumulate: forwards to an update.
        learning_rate: the greatest; it rises over ``warmup`` of the steps and falls to a tenth as a cosine.
        weight_decay, clip: of AdamW, and the greatest norm of the gradients.
        objective: a name in ``outpace.train.objectives``.
        bf16: forwards of the module in bfloat16; its weights stay float32.
        evaluate_every: steps between measurements on the held-out rows; each also writes a checkpoint.
        patience: measurements in a row without a longer expected length, after which training stops; 0 for
            none.
        seed: of the order of the rows.
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

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "accumulate", "evaluate_every"):
            if getattr(self, name) < 1:
                raise OutpaceError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.patience < 0 or self.learning_rate <= 0 or not 0 <= self.warmup < 1:
            raise OutpaceError("patience must be at least 0, learning_rate above 0, warmup in [0, 1)")
        objective(self.objective)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        way = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))


@dataclass
class Progress:
    """How far a run has come; part of its checkpoint.

    Attributes:
        best: the greatest expected length so far, and ``measured``, what was measured then.
        waited: measurements since.
    """

    step: int = 0
    best: float = 0.0
    waited: int = 0
    measured: dict[str, Any] = field(default_factory=dict)


def train(
    module: Learned,
    rows: Seq[Row],
    held_out: Seq[Row],
    settings: Training,
    out: Path,
    report: Callable[[Mapping[str, Any]], None] = lambda entry: None,
    calibration: Seq[Row] = (),
) -> Progress:
    """Train a module on packed rows; the best weights by the held-out expected length end up in ``out``.

    A run whose ``out`` holds a checkpoint goes on from it, to the very weights of a run that was not
    interrupted: the order of the rows depends on seed and step alone, and each step reseeds torch.

    Args:
        module: bound to its target.
        report: called with each entry of the log, ``log.jsonl`` in ``out``.
        calibration: rows that a module measures on what it drafts by, such as how often each head is right;
            neither learnt nor held out. Heads need some.

    Raises:
        OutpaceError: accelerate is missing, or the checkpoint is of other data or settings.
    """
    accelerator = _accelerator(module.target, settings)
    groups = [{"params": weights, "relative": rate} for rate, weights in module.groups()]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    prepared, optimizer = accelerator.prepare(module, optimizer)
    checkpoints = Checkpoints(out, accelerator, _signature(module, rows, settings))
    progress = Progress(**checkpoints.load())
    log = _Log(out / LOG, progress.step, report, accelerator.is_main_process)
    order = _Order(len(rows), settings.rows * accelerator.num_processes, settings.seed)
    while progress.step < settings.steps and not (settings.patience and progress.waited >= settings.patience):
        torch.manual_seed(key(settings.seed, progress.step))
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(progress.step) * group["relative"]
        module.at_step(progress.step, settings.steps)
        batches = (
            [rows[place] for place in order.places(progress.step * settings.accumulate + turn)]
            for turn in range(settings.accumulate)
        )
        parts = [_forward(module, prepared, optimizer, accelerator, batch, settings) for batch in batches]
        progress.step += 1
        log.write(_entry(progress.step, parts, settings.rate(progress.step - 1)))
        if progress.step % settings.evaluate_every == 0 or progress.step == settings.steps:
            log.write(_measure(module, held_out, calibration, settings, progress))
            if progress.waited == 0 and accelerator.is_main_process:
                module.save(out)
            checkpoints.save(asdict(progress))
    return progress


def _forward(
    module: Learned, prepared: Any, optimizer: Any, accelerator: Any, rows: Seq[Row], settings: Training
) -> Losses:
    """One forward and backward over this process's share of some rows; a step's last updates the weights."""
    own = rows[accelerator.process_index :: accelerator.num_processes]
    batch = read_batch(module.target, own, module.hidden_layers)
    with accelerator.accumulate(prepared):
        with accelerator.autocast():
            losses: Losses = prepared(batch, objective(settings.objective))
        accelerator.backward(losses.total)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(module.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _accelerator(target: TargetModel, settings: Training) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise OutpaceError("training needs accelerate: pip install 'outpace[train]'") from error
    return Accelerator(
        cpu=target.hidden.device.type == "cpu",
        mixed_precision="bf16" if settings.bf16 else "no",
        gradient_accumulation_steps=settings.accumulate,
        step_scheduler_with_optimizer=False,
    )


def _signature(module: Learned, rows: Seq[Row], settings: Training) -> dict[str, Any]:
    """What a checkpoint must have been made with for a run to go on from it."""
    tokens = sum(len(document.tokens) for row in rows for document in row)
    return {
        "method": module.method,
        "config": asdict(module.config),
        "target": asdict(module.fit),
        "rows": len(rows),
        "tokens": tokens,
        "settings": asdict(settings),
    }


def _measure(
    module: Learned, held_out: Seq[Row], calibration: Seq[Row], settings: Training, progress: Progress
) -> dict[str, Any]:
    """What the module is worth on held-out text; a better one is noted in the progress."""
    module.eval()
    module.calibrate(_batches(module, calibration, settings.rows))
    replay, loss = evaluate(module, _batches(module, held_out, settings.rows), objective(settings.objective))
    module.train()
    found = {
        "held_out_loss": loss,
        "expected_length": replay.expected_length,
        "accepted_per_position": replay.acceptance,
        **module.figures(_batches(module, held_out, settings.rows)),
    }
    if replay.expected_length > progress.best:
        progress.best, progress.waited, progress.measured = replay.expected_length, 0, found
    else:
        progress.waited += 1
    return {"step": progress.step, **found}


def _batches(module: Learned, rows: Seq[Row], together: int) -> Iterator[Batch]:
    for start in range(0, len(rows), together):
        yield read_batch(module.target, rows[start : start + together], module.hidden_layers)


def _entry(step: int, parts: Seq[Losses], rate: float) -> dict[str, Any]:
    """The means of a step's forwards, places counted alike."""
    places = torch.stack([part.places for part in parts])
    total = places.sum(dim=0).clamp(min=1)

    def mean(name: str) -> list[float]:
        values = torch.stack([getattr(part, name) for part in parts])
        means: list[float] = ((values * places).sum(dim=0) / total).tolist()
        return means

    loss = sum(float(part.total.detach()) for part in parts) / len(parts)
    return {
        "step": step,
        "loss": loss,
        "loss_by_depth": mean("loss"),
        "acceptance_by_depth": mean("acceptance"),
        "learning_rate": rate,
    }


class _Order:
    """Which rows each forward reads: all of them in an order of its own in each epoch."""

    def __init__(self, rows: int, together: int, seed: int) -> None:
        self._rows = rows
        self._together = together
        self._seed = seed
        self._epoch: tuple[int, list[int]] = (-1, [])

    def places(self, forward: int) -> list[int]:
        return [self._place(at) for at in range(forward * self._together, (forward + 1) * self._together)]

    def _place(self, at: int) -> int:
        epoch, place = divmod(at, self._rows)
        if self._epoch[0] != epoch:
            random = torch.Generator().manual_seed(key(self._seed, epoch) % 2**63)
            self._epoch = epoch, torch.randperm(self._rows, generator=random).tolist()
        return self._epoch[1][place]


class _Log:
    """The log in JSONL; entries after the checkpoint that a run goes on from are dropped."""

    def __init__(
        self, file: Path, step: int, report: Callable[[Mapping[str, Any]], None], writes: bool
    ) -> None:
        self._file = file if writes else None
        self._report = report
        if writes:
            file.parent.mkdir(parents=True, exist_ok=True)
            old = file.read_text(encoding="utf-8").splitlines() if step and file.exists() else []
            kept = [line for line in old if json.loads(line)["step"] <= step]
            file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(entry) + "\n")
        self._report(entry)
