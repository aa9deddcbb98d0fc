"""The target's hidden states at training text, kept on disk: a row read again needs no forward."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core import OutpaceError
from outpace.targets.base import Rows, TargetModel
from outpace.train.data import Document

States = dict[int, Tensor]
"""Layer -> hidden states of a row's places, [places, hidden size]."""

_PROBE = 16  # tokens whose states identify a target


class KeptStates:
    """States in a folder, a file per row of documents.

    A file belongs to the target's weights and dtype, which are recognised by the states of a short text, to
    the layers and to the row's tokens. Several runs, of any method, may share a folder.

    Args:
        folder: created if needed.
        target: its logits must be those of its head, for the states alone are kept.

    Raises:
        OutpaceError: they are not, or the folder cannot be made.
    """

    @torch.no_grad()
    def __init__(self, folder: Path, target: TargetModel) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutpaceError(f"states cannot be kept in {folder}: {error.strerror or error}") from None
        text = list(range(min(_PROBE, target.vocabulary)))
        cache = target.new_cache(1, len(text))
        slot = target.open(cache, target.encode(text if target.has_encoder else None))
        output = target.forward(cache, {slot: Rows(text)}, hidden_layers=(-1,))
        states, logits = output.hidden_of(slot, 0, len(text))[-1], output.logits_of(slot)
        if not torch.allclose(target.head(states).float(), logits.float(), rtol=0.02, atol=0.1):
            raise OutpaceError(
                f"the logits of {target.name} are not those of its head, so they cannot be computed from its "
                "states; train without keeping states"
            )
        self._target = hashlib.sha256(_bytes(states)).hexdigest()

    def of(self, row: Seq[Document], layers: Iterable[int], run: Callable[[], States]) -> States:
        """The states of a row, from its file, or from ``run``, which are then kept.

        Raises:
            OutpaceError: the file is damaged, or there is no room for another.
        """
        facts = [self._target, *layers, *(document.tokens for document in row)]
        facts += [document.source for document in row if document.source]
        file = self._folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.safetensors"
        try:
            if file.exists():
                return {int(layer): states for layer, states in load_file(file).items()}
            made = run()
            part = file.with_suffix(f".{os.getpid()}")
            # Copies: the last layer may be there under two numbers, and files take no tensor twice.
            whole = torch.contiguous_format
            save_file({str(at): states.cpu().clone(memory_format=whole) for at, states in made.items()}, part)
            part.replace(file)
        except (OSError, SafetensorError) as error:
            raise OutpaceError(
                f"{file} cannot be read or written: {error}; delete it, or give another folder for the states"
            ) from error
        return made


def _bytes(states: Tensor) -> bytes:
    return states.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
