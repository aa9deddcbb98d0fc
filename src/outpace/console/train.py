"""``outpace train``: a learned drafter for a user's own model and data."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from rich.table import Table

from outpace.console import progress, screen
from outpace.console.models import Loaded
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters import LEARNED
from outpace.drafting.learned import Fit, Learned
from outpace.spec import load
from outpace.targets.base import TargetModel
from outpace.train import data, hub, provenance
from outpace.train.boosting import load_earlier
from outpace.train.data import Document
from outpace.train.distil import answer
from outpace.train.feed import Feed, Row
from outpace.train.joint import TARGET, Joint
from outpace.train.loop import Training, train
from outpace.train.lora import LoRA
from outpace.train.metric import replay

ANSWERS, MADE_FROM = "answers.jsonl", "answers.json"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What is learnt from.

    Attributes:
        source: a JSONL file, a folder of them, or a data set of the hub, as ``outpace.train.hub`` reads it.
        chat: prompts are turns of a chat.
        distil: the target answers every prompt, also those whose answer is there.
        max_new_tokens, temperature: of those answers.
        length: tokens of a packed row.
        held_out: the share of the documents that is reported on; half as many more are for calibration.
    """

    source: str
    chat: bool
    distil: bool
    max_new_tokens: int
    temperature: float
    length: int
    held_out: float


def module_of(method: str, target: TargetModel, draft: str | None = None) -> Learned:
    """A module of a method that is to be trained, the method given as in ``medusa:heads=5``.

    Args:
        draft: a model to go on from, where the method begins with one.

    Raises:
        OutpaceError: no such method or option, or a target that it does not fit.
    """
    if method.partition(":")[0].strip() == "self_speculative":
        raise OutpaceError("self_speculative is not trained; `outpace search` finds the layers it skips")
    begins = {name: cls.checkpoint_type or cls.config_type for name, cls in LEARNED.items()}
    types = {name: cls.config_type for name, cls in LEARNED.items()} if draft is None else begins
    options, cls = load("method", types, method), LEARNED[method.partition(":")[0].strip()]
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
) -> dict[str, Any]:
    """Train, and write the drafter and its provenance; what came of it.

    Args:
        draft: a model to go on from.
        boost_after: folders of drafters whose mistakes are to be learnt.
        tune: how the model itself is trained too, as in ``lora:rank=16``; empty leaves it as it is.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    _check_places(out, [draft, *boost_after])
    torch_seed(settings.seed)
    module = module_of(method, model.target, draft)
    if tune:
        module = Joint(module, load("way to train a model", {"lora": LoRA}, tune))
    earlier = [load_earlier(folder, model.target) for folder in boost_after]
    documents = _documents(model, corpus, out)
    parts = data.split(documents, corpus.held_out)
    rows, calibration, held_out = (
        data.pack(part, corpus.length) for part in (parts.learnt, parts.calibration, parts.held_out)
    )
    module.accompany(out, model.tokenizer)
    with progress.bar(settings.steps, "steps") as bar:
        reached = train(module, rows, held_out, settings, out, _told(bar), earlier, calibration=calibration)
    found = {
        "method": method.partition(":")[0].strip(),
        "target": dataclasses.asdict(Fit.of(model.target)),
        "parameters": sum(weight.numel() for weight in module.parameters()),
        "documents": len(parts.learnt),
        "calibration_documents": len(parts.calibration),
        "held_out_documents": len(parts.held_out),
        "tokens": sum(len(document.tokens) for document in parts.learnt),
        "steps": reached.step,
        "tokens_seen": _seen(rows, settings, reached.step),
        **reached.measured,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
    }
    if earlier:
        feed = Feed(earlier[0], held_out, settings.rows, settings.seed, earlier=earlier[1:])
        found["earlier_expected_length"] = replay(earlier, feed.each(held_out)).expected_length
    facts = {
        "command": sys.argv,
        "config": dataclasses.asdict(module.config),
        "boost_after": list(boost_after),
        "data": {"source": corpus.source, "sha256": data.digest(documents)},
        "corpus": {name: value for name, value in vars(corpus).items() if name != "source"},
        "settings": dataclasses.asdict(settings) | {"tune": tune},
        "result": found,
    }
    provenance.write(out, facts)
    tuned = {"tuned_model": str(out / TARGET)} if tune else {}
    return {**found, "out": str(out), **tuned}


def _told(bar: progress.Bar) -> Callable[[Mapping[str, Any]], None]:
    """Shows entries of the log on a bar."""
    last = {"length": ""}

    def report(entry: Mapping[str, Any]) -> None:
        if "loss" in entry:
            bar.advance(f"loss {entry['loss']:.3f}{last['length']}")
        else:
            last["length"] = f", {entry['expected_length']:.2f} tokens a step"

    return report


def _seen(rows: Seq[Row], settings: Training, steps: int) -> int:
    """Tokens that so many steps read on one device, prompts included: whole passes and a share of one."""
    every = sum(len(document.tokens) for row in rows for document in row)
    return round(every * steps * settings.rows * settings.accumulate / len(rows))


def _check_places(out: Path, read: Seq[str | None]) -> None:
    """Refuse to write over what is read."""
    for folder in read:
        if folder is not None and Path(folder).resolve() == out.resolve():
            raise OutpaceError(f"{out} is read and would be written over; give another --out")


def torch_seed(seed: int) -> None:
    """Let the first weights depend on the seed alone."""
    import torch

    torch.manual_seed(seed % 2**63)


def _documents(model: Loaded, corpus: Corpus, out: Path) -> list[Document]:
    """The documents, the target's answers among them."""
    read = hub.read if corpus.source.startswith(hub.PREFIX) else data.read
    documents = read(corpus.source, model, corpus.chat)
    context = model.target.context
    room = corpus.length if context is None else min(corpus.length, context)
    if room < corpus.length:
        raise OutpaceError(f"the model's context is {context}; give --length {context} or less")
    asked = [document for document in documents if corpus.distil or document.open]
    given = [document for document in documents if not (corpus.distil or document.open)]
    fits = [document for document in asked if document.prompt < room and len(document.tokens) < room]
    if len(fits) < len(asked):
        screen.note(f"left out, as longer than {room} tokens: {len(asked) - len(fits)} prompts")
    return [*given, *_answers(model, fits, corpus, out)] if fits else given


def _answers(model: Loaded, prompts: list[Document], corpus: Corpus, out: Path) -> list[Document]:
    """The target's answers; they are kept in ``out``, with what they were made from.

    Raises:
        OutpaceError: those in ``out`` are to other prompts, or were made with other options.
    """
    file, note = out / ANSWERS, out / MADE_FROM
    facts = {
        "target": Fit.of(model.target).name,
        "prompts": data.digest(prompts),
        "max_new_tokens": corpus.max_new_tokens,
        "temperature": corpus.temperature,
    }
    if file.is_file() and note.is_file():
        if json.loads(note.read_text("utf-8")) != facts:
            raise OutpaceError(
                f"{file} has other prompts' answers, or with other options; give another --out"
            )
        screen.note(f"the target's answers are in {file} already")
        return data.read(file, model)
    params = SamplingParams(max_new_tokens=corpus.max_new_tokens, temperature=corpus.temperature, seed=0)
    with progress.bar(len(prompts), "prompts answered") as bar:
        answers = answer(model.target, prompts, params, report=lambda done: bar.advance(steps=done))
    out.mkdir(parents=True, exist_ok=True)
    data.write(answers, file)
    note.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    return answers


def table(found: Mapping[str, Any]) -> Table:
    """What came of a training, for a person."""
    made = Table("", "", show_header=False, box=None)
    made.columns[1].overflow = "fold"  # a path is there to be copied
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
