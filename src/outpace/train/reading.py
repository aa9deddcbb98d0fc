"""Running the target over packed text: its logits and hidden states at each place."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch.nn.utils.rnn import pad_sequence

from outpace.learned.learned import Batch
from outpace.targets.base import Rows, TargetModel
from outpace.train.data import Document


def read_batch(target: TargetModel, rows: Seq[Seq[Document]], layers: Seq[int]) -> Batch:
    """Run the target over packed rows and return a batch.

    The documents of a row are branches of one tree, each a chain from position 0, so the target's tree mask
    keeps them apart.

    Args:
        rows: [B] rows of documents; shorter rows are padded.
        layers: the layers whose hidden states the batch contains.
    """
    width = max(sum(len(document.tokens) for document in row) for row in rows)
    fed, tokens, positions, documents, counted = [], [], [], [], []
    for row in rows:
        parents: list[int] = []
        for document in row:
            first = len(parents)
            parents += [-1, *range(first, first + len(document.tokens) - 1)]
        text = [token for document in row for token in document.tokens]
        fed.append(Rows(text, parents))
        gap = width - len(text)
        tokens.append(text + [0] * gap)
        positions.append([place for d in row for place in range(len(d.tokens))] + [0] * gap)
        documents.append([at for at, d in enumerate(row) for _ in d.tokens] + [-1] * gap)
        counted.append([place >= d.prompt for d in row for place in range(len(d.tokens))] + [False] * gap)
    cache = target.new_cache(len(rows), width)
    slots = [cache.allocate() for _ in rows]
    output = target.forward(cache, dict(zip(slots, fed, strict=True)), hidden_layers=layers)
    logits = pad_sequence([output.logits_of(slot) for slot in slots], batch_first=True)
    states = [output.hidden_of(slot, 0, len(row.tokens)) for slot, row in zip(slots, fed, strict=True)]
    device = logits.device
    # Copies, made out of inference mode, so that a module may be trained on them.
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        documents=torch.tensor(documents, device=device),
        counted=torch.tensor(counted, device=device),
        hidden={layer: pad_sequence([own[layer] for own in states], batch_first=True) for layer in layers},
        logits=logits,
    )
