"""Low-rank updates of a model's weights in a folder written by peft: their base model, and merging."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

ADAPTER = "adapter_config.json"  # as peft names it
_WEIGHTS = "adapter_model.safetensors"


def base_of(folder: str | Path) -> str:
    """The name or folder of the base model of a peft folder.

    Raises:
        OutpaceError: the folder does not name it.
    """
    file = Path(folder) / ADAPTER
    try:
        base = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise OutpaceError(f"{file} cannot be read: {error}") from error
    if not (isinstance(base, str) and base):
        raise OutpaceError(f"{file} does not name its model: write it there as base_model_name_or_path")
    return base


def merge(model: Any, folder: str | Path) -> Any:
    """Add the updates in a peft folder to a model's weights, in place, and return the model.

    Raises:
        OutpaceError: peft is missing, or the updates do not fit the model; the message names a tensor.
    """
    from safetensors import SafetensorError, safe_open

    peft = import_peft(f"reading {folder}")
    try:
        with safe_open(Path(folder) / _WEIGHTS, "pt") as file:
            held = set(file.keys())
        with without_advice():
            found = peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise OutpaceError(f"{folder} does not fit {type(model).__name__}: {reason}") from error
    # peft ignores a missing or superfluous tensor, or only warns.
    odd = sorted(held ^ set(peft.get_peft_model_state_dict(found, save_embedding_layers=False)))
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
        raise OutpaceError(f"{purpose} needs peft: pip install 'outpace[lora]'") from error
    return peft


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence peft's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
