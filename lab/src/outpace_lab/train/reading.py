"""Running the target over packed text: its logits and hidden states at each place."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Rows
from outpace.targets.stock.seq2seq import Seq2SeqTarget
from outpace_lab.train.batch import padded
from outpace_lab.train.data import Document
from outpace_lab.train.states import KeptStates, States
from outpace_lab.train.trained import TrainingBatch


def read_batch(
    target: TargetModel, rows: Seq[Seq[Document]], layers: Seq[int], kept: KeptStates | None = None
) -> TrainingBatch:
    """Run the target over packed rows and return a batch.

    Without ``layers`` and ``kept`` it runs when the logits are first read.

    The documents of a row are branches of one tree, each a chain from position 0, so the target's tree mask
    keeps them apart. A document with a source is alone in its row.

    Args:
        rows: [B] rows of documents; shorter rows are padded.
        layers: the layers whose hidden states the batch contains.
        kept: where states are kept. Each row is then run by itself, so that its states do not depend on the
            others, and logits are computed from them if they are needed.
    """
    width = max(sum(len(document.tokens) for document in row) for row in rows)
    tokens, positions, documents, counted = [], [], [], []
    for row in rows:
        text = [token for document in row for token in document.tokens]
        gap = width - len(text)
        tokens.append(text + [0] * gap)
        positions.append([place for d in row for place in range(len(d.tokens))] + [0] * gap)
        documents.append([at for at, d in enumerate(row) for _ in d.tokens] + [-1] * gap)
        counted.append([place >= d.prompt for d in row for place in range(len(d.tokens))] + [False] * gap)
    scores: Tensor | Callable[[], Tensor]
    if kept is None and layers:
        states, logits = _run(target, rows, layers, scored=True)
        scores = pad_sequence(logits, batch_first=True)
    elif kept is None:
        states = [{} for _ in rows]

        def scores() -> Tensor:
            # The drafter's forward may be in bfloat16; the target's is in its own dtype.
            with torch.autocast(target.hidden.device.type, enabled=False):
                return pad_sequence(_run(target, rows, (), scored=True)[1], batch_first=True)

    else:
        wanted = tuple(sorted({*layers, -1}))
        states = [kept.of(row, wanted, partial(_alone, target, row, wanted)) for row in rows]
        device = target.hidden.device
        last = pad_sequence([own[-1] for own in states], batch_first=True).to(device)

        def scores() -> Tensor:
            with torch.no_grad():
                return target.head(last)

    device = target.hidden.device
    # Copies, made out of inference mode, so that a module may be trained on them.
    return TrainingBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        documents=torch.tensor(documents, device=device),
        counted=torch.tensor(counted, device=device),
        hidden={
            layer: pad_sequence([own[layer] for own in states], batch_first=True).to(device)
            for layer in (layers if kept is None else wanted)
        },
        scores=scores,
        source=padded([row[0].source if target.shares_ids else () for row in rows], device),
    )


def _alone(target: TargetModel, row: Seq[Document], layers: Seq[int]) -> States:
    (states,), _ = _run(target, [row], layers)
    return states


def _run(
    target: TargetModel, rows: Seq[Seq[Document]], layers: Seq[int], scored: bool = False
) -> tuple[list[States], list[Tensor]]:
    """The states of each row, and its logits if it is to be scored."""
    if isinstance(target, Seq2SeqTarget):
        return target.read_texts([(row[0].source, row[0].tokens) for row in rows], layers, scored)
    fed = []
    for row in rows:
        parents: list[int] = []
        for document in row:
            first = len(parents)
            parents += [-1, *range(first, first + len(document.tokens) - 1)]
        fed.append(Rows([token for document in row for token in document.tokens], parents))
    cache = target.new_cache(len(rows), max(len(row.tokens) for row in fed))
    slots = [target.open(cache, target.encode(row[0].source or None)) for row in rows]
    feeds = dict(zip(slots, fed, strict=True))
    output = target.forward(cache, Batch.of(feeds, 0 if scored else None), layers)
    states = [dict(output.hidden_of(slot, 0, len(row.tokens))) for slot, row in feeds.items()]
    return states, [output.logits_of(slot) for slot in slots] if scored else []
