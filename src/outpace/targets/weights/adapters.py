"""Low-rank updates of a model's weights in a folder written by peft: their base model, and merging."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError, first_line, install
from outpace.files import read_json
from outpace.names import ADAPTER
from outpace.targets.weights.checkpoint import FLOATS, header

_WEIGHTS = "adapter_model.safetensors"


def base_of(folder: str | Path) -> str:
    """The name or folder of the base model of a peft folder.

    Raises:
        OutpaceError: the folder does not name it.
    """
    file = Path(folder) / ADAPTER
    found = read_json(file)
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    if not (isinstance(base, str) and base):
        raise OutpaceError(f"{file} does not name its model: write it there as base_model_name_or_path")
    return base


def tensors_of(folder: str | Path) -> list[str]:
    """The names of the tensors in a peft folder.

    Raises:
        OutpaceError: its file of weights is broken.
    """
    return list(header(Path(folder) / _WEIGHTS))


def merge(model: Any, folder: str | Path) -> Any:
    """Add the updates in a peft folder to a model's weights, in place, and return the model.

    Raises:
        OutpaceError: peft is missing, or the updates do not fit the model; the message names a tensor.
    """
    from safetensors import SafetensorError

    peft = import_peft(f"reading {folder}")
    kinds = header(Path(folder) / _WEIGHTS)
    odd = sorted(name for name, kind in kinds.items() if kind not in FLOATS)
    if odd:
        raise OutpaceError(
            f"{folder}: tensor {odd[0]!r} is of {kinds[odd[0]]}; updates are of {', '.join(FLOATS)}"
        )
    try:
        with without_advice():
            found = peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = first_line(error) if isinstance(error, KeyError) else " ".join(str(error).split())
        raise OutpaceError(f"{folder} does not fit {type(model).__name__}: {reason}") from error
    # peft ignores a missing or superfluous tensor, or only warns.
    odd = sorted(kinds.keys() ^ set(peft.get_peft_model_state_dict(found, save_embedding_layers=False)))
    if odd:
        raise OutpaceError(f"{folder} does not fit {type(model).__name__}: tensor {odd[0]!r}")
    merged = found.merge_and_unload().eval()
    merged.name_or_path = str(folder)  # updates trained later belong to the merged model, not to its base
    return merged


def import_peft(purpose: str) -> Any:
    """Import peft.

    Raises:
        OutpaceError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise OutpaceError(f"{purpose} needs peft: {install('lora')}") from error
    return peft


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence peft's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
