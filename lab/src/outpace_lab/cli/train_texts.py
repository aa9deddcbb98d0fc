"""The texts of a training: for learning, calibration, and the reported figures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outpace.cli import screen
from outpace.core import OutpaceError, SamplingParams
from outpace.loading import Loaded
from outpace_lab.cli.train_answers import ANSWERS, HELD_OUT, answered
from outpace_lab.train import data, hub
from outpace_lab.train.data import Document, Split
from outpace_lab.train.feed import Row
from outpace_lab.train.processes import Processes
from outpace_lab.train.trained import Trained


@dataclass(frozen=True)
class Corpus:
    """Training texts.

    Attributes:
        source: a JSONL file, a folder of them, or a data set of the hub, as ``train.hub`` reads it.
        chat: put prompts into the chat template.
        distil: let the target answer every prompt, even those with an answer.
        max_new_tokens, temperature: options of the target's answers.
        length: tokens of a packed row.
        held_out: the share of documents for the reported figures; half as many more are for calibration.
    """

    source: str
    chat: bool
    distil: bool
    max_new_tokens: int
    temperature: float
    length: int
    held_out: float

    @property
    def params(self) -> SamplingParams:
        """Options of the target's answers."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=0)


@dataclass(frozen=True)
class Texts:
    """Packed rows.

    Attributes:
        documents: all of the data, the target's answers included.
        parts: the documents by purpose.
        learnt, calibration: rows of those parts.
        held_out: rows of the target's own text after the held-out prompts.
        lost: number of tokens cut off each answer that does not fit a row.
    """

    documents: list[Document]
    parts: Split
    learnt: Seq[Row]
    calibration: Seq[Row]
    held_out: Seq[Row]
    lost: list[int]


def prepare(model: Loaded, module: Trained, corpus: Corpus, out: Path, processes: Processes) -> Texts:
    """Read the texts, let the target answer prompts, split and pack.

    Args:
        module: what is trained.
        out: the drafter's folder, which keeps the answers.

    Raises:
        OutpaceError: the data cannot be read or leave nothing to learn, or rows are longer than a context.
    """
    context = model.target.context
    if context is not None and corpus.length > context:
        raise OutpaceError(f"the model's context is {context}; give --length {context} or less")
    read = hub.read(corpus.source, model, corpus.chat)
    documents = [data.sourced(document, model.target) for document in read]
    given = [document for document in documents if not (corpus.distil or document.open)]
    asked = _short_enough(corpus, [document for document in documents if corpus.distil or document.open])
    _check(module, corpus, given, asked)
    answers = answered(model, asked, corpus.params, out, processes, ANSWERS) if asked else []
    parts = data.split([*given, *answers], corpus.held_out)
    theirs = set(given)
    own = [document for document in parts.held_out if document not in theirs]
    own += _in_own_words(model, corpus, [d for d in parts.held_out if d in theirs], out, processes)
    lost = data.lost(parts.learnt, corpus.length)
    if lost:
        screen.note(
            f"{len(lost)} answers do not fit into --length {corpus.length} with their prompts; "
            f"{sum(lost)} of their tokens are not learnt"
        )
    learnt, calibration, held_out = (
        data.pack(part, corpus.length) for part in (parts.learnt, parts.calibration, own)
    )
    return Texts([*given, *answers], parts, learnt, calibration, held_out, lost)


def _short_enough(corpus: Corpus, asked: list[Document]) -> list[Document]:
    """The prompts that leave room for an answer."""
    fits = [d for d in asked if d.prompt < corpus.length and len(d.tokens) < corpus.length]
    if len(fits) < len(asked):
        screen.note(f"left out, longer than {corpus.length} tokens: {len(asked) - len(fits)} prompts")
    return fits


def _check(module: Trained, corpus: Corpus, given: list[Document], asked: list[Document]) -> None:
    """Refuse what training would refuse once the target has answered, which takes longest.

    A document's part depends on its prompt alone, so the parts are known.
    """
    data.check_vocabulary([*given, *asked], module.target.vocabulary)
    parts = data.split([*given, *asked], corpus.held_out)
    if module.needs_calibration and not parts.calibration:
        raise OutpaceError(
            f"with {len(given) + len(asked)} documents and a held-out share of {corpus.held_out} "
            "there are none to measure the heads on; give more documents, or another share"
        )
    sizes = [len(d.tokens) for d in given] + [len(d.asked) + corpus.max_new_tokens for d in asked]
    longest = min(corpus.length, max(sizes))
    if module.context is not None and longest > module.context:
        raise OutpaceError(
            f"{module.method}: a text may have {longest} tokens, more than the drafter's context of "
            f"{module.context}; give --length {module.context} or less"
        )


def _in_own_words(
    model: Loaded, corpus: Corpus, held_out: Seq[Document], out: Path, processes: Processes
) -> list[Document]:
    """The target's answers to the prompts of documents that it did not write.

    A draft is accepted if the target would emit it, so the tokens per step of decoding cannot be measured on
    other text.
    """
    pieces = [data.cut(document, corpus.length) for document in held_out]
    if not all(pieces):
        screen.note(f"not measured on, no room for an answer in --length {corpus.length}: {pieces.count([])}")
    asked = dict.fromkeys((piece.asked, piece.source) for found in pieces for piece in found)
    prompts = [Document(tokens, len(tokens), True, source) for tokens, source in asked]
    return answered(model, prompts, corpus.params, out, processes, HELD_OUT) if prompts else []
