"""``outpace train``: a learned drafter for a user's own model and data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from outpace.cli import progress, screen
from outpace.core import OutpaceError
from outpace.learned.learned import CONFIG, WEIGHTS, Fit
from outpace.loading import Loaded
from outpace.spec import load
from outpace.spec_text import plain
from outpace.targets.base import TargetModel
from outpace_lab.cli import train_answers as answers
from outpace_lab.cli.train_texts import Corpus, Texts, prepare
from outpace_lab.names import method_of
from outpace_lab.train import data, provenance
from outpace_lab.train.boosting import load_earlier
from outpace_lab.train.checkpoint import CHECKPOINT, OLD
from outpace_lab.train.feed import Feed, Row
from outpace_lab.train.joint import TARGET, Joint
from outpace_lab.train.log import LOG
from outpace_lab.train.loop import Training, check_on_policy, train
from outpace_lab.train.lora import LoRA
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.metric import replay
from outpace_lab.train.processes import Processes
from outpace_lab.train.states import KeptStates
from outpace_lab.train.trained import Trained


def options_of(method: str, draft: str | None = None) -> tuple[Any, type[Trained]]:
    """The options of a method given as in ``medusa:heads=5``, and the class of its module.

    Args:
        draft: a model to start from, if the method can.

    Raises:
        OutpaceError: unknown method or option.
    """
    method = plain(method)
    name = method_of(method)
    begins = {name: cls.checkpoint_type or cls.config_type for name, cls in LEARNED.items()}
    types = {name: cls.config_type for name, cls in LEARNED.items()} if draft is None else begins
    return load("method", types, method), LEARNED[name]


def way_of(tune: str) -> LoRA:
    """How a model is trained too, as in ``lora:rank=16``."""
    return load("way to train a model", {"lora": LoRA}, tune)


def module_of(method: str, target: TargetModel, draft: str | None = None) -> Trained:
    """Build the module to train.

    Raises:
        OutpaceError: as for ``options_of``, or the module does not fit the target.
    """
    options, cls = options_of(method, draft)
    return cls.new(options, target) if draft is None else cls.begin(draft, options, target)


def run(
    method: str,
    model: Loaded,
    corpus: Corpus,
    settings: Training,
    out: Path,
    draft: str | None = None,
    boost_after: Seq[str] = (),
    tune: str = "",
    states: Path | None = None,
) -> dict[str, Any]:
    """Train, write the drafter and its provenance, and return the results.

    Args:
        draft: a model to start from.
        boost_after: folders of drafters whose mistakes are to be learnt.
        tune: how the model itself is trained too, as in ``lora:rank=16``; empty leaves it unchanged.
        states: folder that keeps the model's hidden states; None keeps none.
    """
    processes = Processes(model.target.hidden.device)
    _check_places(out, [draft, *boost_after])
    finished = provenance.read(out)
    torch.manual_seed(settings.seed % 2**63)  # of the initial weights
    module = module_of(method, model.target, draft)
    if tune:
        module = Joint(module, way_of(tune))
    earlier = [load_earlier(folder, model.target) for folder in boost_after]
    check_on_policy(module, settings, earlier)
    kept = None if states is None else KeptStates(states, model.target)
    texts = prepare(model, module, corpus, out, processes)
    if processes.first:
        module.accompany(out, model.tokenizer)
    with progress.bar(settings.steps, "steps") as bar:
        shown = _Shown(bar)
        rows = texts.learnt, texts.held_out
        reached = train(module, *rows, settings, out, shown, earlier, texts.calibration, kept)
    tuned = {"tuned_model": str(out / TARGET)} if tune else {}
    if finished and not shown.step:
        screen.note(f"finished already; see {out / provenance.PROVENANCE}")
        return {**finished["result"], "out": str(out), **tuned}
    found = {
        "method": plain(method).partition(":")[0].strip(),
        "target": dataclasses.asdict(Fit.of(model.target)),
        "parameters": sum(weight.numel() for weight in module.parameters()),
        **_amounts(texts),
        "steps": reached.step,
        "processes": processes.count,
        "tokens_seen": _seen(texts.learnt, settings, reached.step * processes.count),
        "measured_on": f"the target's own text at temperature {corpus.temperature:g}",
        **reached.measured,
        "seconds": reached.seconds,
        "cpu_seconds": reached.cpu_seconds,
        "answering_seconds": answers.seconds(out),
    }
    if earlier:
        feed = Feed(earlier[0], texts.held_out, settings.rows, settings.seed, earlier=earlier[1:], kept=kept)
        found["earlier_expected_length"] = replay(earlier, feed.each(texts.held_out)).expected_length
    facts = {
        "command": sys.argv,
        "config": dataclasses.asdict(module.config),
        "boost_after": list(boost_after),
        "data": {"source": corpus.source, "sha256": data.digest(texts.documents)},
        "corpus": {name: value for name, value in vars(corpus).items() if name != "source"},
        "settings": dataclasses.asdict(settings) | {"tune": tune},
        "result": found,
    }
    if processes.first:
        provenance.write(out, facts)
    return {**found, "out": str(out), **tuned}


class _Shown:
    """Display of a run's log on a bar.

    Attributes:
        step: the last step made; 0 if there was none.
    """

    def __init__(self, bar: progress.Bar) -> None:
        self._bar = bar
        self._length = ""
        self.step = 0

    def __call__(self, entry: Mapping[str, Any]) -> None:
        if "loss" in entry:
            # A resumed run does not begin with step 1.
            self._bar.advance(f"loss {entry['loss']:.3f}{self._length}", entry["step"] - self.step)
            self.step = entry["step"]
        else:
            self._length = f", {entry['expected_length']:.2f} tokens per step"


def _amounts(texts: Texts) -> dict[str, int]:
    """Numbers of texts to learn from and to measure on."""
    return {
        "documents": len(texts.parts.learnt),
        "calibration_documents": len(texts.parts.calibration),
        "held_out_documents": len(texts.parts.held_out),
        "tokens": _tokens(texts.learnt),
        "cut_documents": len(texts.lost),
        "cut_tokens": sum(texts.lost),
    }


def _tokens(rows: Seq[Row]) -> int:
    return sum(len(document.tokens) for row in rows for document in row)


def _seen(rows: Seq[Row], settings: Training, steps: int) -> int:
    """Tokens read by N steps of a process, prompts included: full passes and a share of one."""
    return round(_tokens(rows) * steps * settings.rows * settings.accumulate / len(rows))


def _check_places(out: Path, read: Seq[str | None]) -> None:
    """Refuse to overwrite inputs, or anything but a run that can be resumed."""
    for folder in read:
        if folder is not None and Path(folder).resolve() == out.resolve():
            raise OutpaceError(f"{out} is an input and would be overwritten; give another --out")
    if out.exists() and not out.is_dir():
        raise OutpaceError(f"{out} is a file, but --out must be a folder")
    goes_on = any((out / name).exists() for name in (CHECKPOINT, OLD)) or (
        (out / LOG).exists() and not (out / provenance.PROVENANCE).exists()
    )
    there = [name for name in (CONFIG, WEIGHTS, provenance.PROVENANCE) if (out / name).exists()]
    if there and not goes_on:
        raise OutpaceError(
            f"{out} contains a model already, and {there[0]} would be overwritten; give another --out"
        )


def table(found: Mapping[str, Any]) -> Table:
    """The result of a training as text."""
    made = Table("", "", show_header=False, box=None)
    made.columns[1].overflow = "fold"  # so that paths can be copied
    for name, value in found.items():
        shown = value
        if isinstance(value, float):
            shown = f"{value:.3f}"
        elif isinstance(value, list | tuple):
            shown = " ".join(f"{part:.3f}" if isinstance(part, float) else str(part) for part in value)
        elif isinstance(value, dict):
            shown = value.get("name", "")
        made.add_row(name.replace("_", " "), str(shown))
    return made
