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
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace_lab.train.data import Document

States = dict[int, Tensor]
"""Layer -> hidden states of a row's places, [places, hidden size]."""

_PROBE = 16  # tokens whose states identify a target
_NAME = "states"  # of the tensor in a file


class KeptStates:
    """States in a folder, a file per layer and row of documents.

    A file belongs to the target's weights and dtype, which are recognised by the states of a short text, to
    the layer and to the row's tokens. Several runs, of any method, may share a folder: what one has kept is
    not run again for another that reads some of the same layers.

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
        output = target.forward(cache, Batch.of({slot: text}), (-1,))
        states, logits = output.hidden_of(slot, 0, len(text))[-1], output.logits_of(slot)
        if not torch.allclose(target.head(states).float(), logits.float(), rtol=0.02, atol=0.1):
            raise OutpaceError(
                f"the logits of {target.name} are not those of its head, so they cannot be computed from its "
                "states; train without keeping states"
            )
        self._target = hashlib.sha256(_bytes(states)).hexdigest()

    def of(self, row: Seq[Document], layers: Iterable[int], run: Callable[[], States]) -> States:
        """The states of a row, from its files, or from ``run`` if one is missing, which are then kept.

        Raises:
            OutpaceError: a file is damaged, or there is no room for another.
        """
        facts = [self._target, *(document.tokens for document in row)]
        facts += [document.source for document in row if document.source]
        text = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        files = {layer: self._folder / f"{text}.{layer}.safetensors" for layer in layers}
        if not all(file.exists() for file in files.values()):
            made = run()
            for layer, file in files.items():
                _write(file, made[layer])
            return made
        return {layer: _read(file) for layer, file in files.items()}


def _read(file: Path) -> Tensor:
    try:
        return load_file(file)[_NAME]
    except (OSError, SafetensorError, KeyError) as error:
        raise _unusable(file, error) from error


def _write(file: Path, states: Tensor) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        save_file({_NAME: states.cpu().contiguous()}, part)
        part.replace(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file, error) from error


def _unusable(file: Path, error: Exception) -> OutpaceError:
    return OutpaceError(
        f"{file} cannot be read or written: {error}; delete it, or give another folder for the states"
    )


def _bytes(states: Tensor) -> bytes:
    return states.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
