"""The folder of a trained module: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core import OutpaceError, first_line
from outpace.files import check_plain, read_json, replacing, sealed, unsealed

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FORMAT = 2
_UNSEALED = 1  # the format of folders that were written without a digest

# Former names of options, in "config" of folders saved before they were renamed.
_RENAMED = {
    "nodes": "max_nodes",
    "num_draft_tokens": "num_speculative_tokens",
    "num_lookahead": "num_speculative_tokens",
}


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files, and into ``config.json`` a digest of both; create the folder if needed.

    Raises:
        OutpaceError: they cannot be written.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutpaceError(f"cannot write {place}: {error.strerror or error}") from None
    own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(place / WEIGHTS) as weights, replacing(place / CONFIG) as described:
        try:
            save_file(own, weights, {"format": "pt"})
        except SafetensorError as error:  # of a full disk too
            raise OutpaceError(f"cannot write {place / WEIGHTS}: {first_line(error)}") from error
        text = json.dumps(sealed(config, _mapped(weights)), indent=2)
        described.write_text(f"{text}\n", encoding="utf-8")


def _mapped(path: Path) -> Any:
    """The bytes of a file, without reading them all into memory."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else b""


def read_config(folder: str | Path, method: str) -> dict[str, Any]:
    """The contents of ``config.json`` in a folder.

    Raises:
        OutpaceError: there is no such file, or it has another method or format.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise OutpaceError(
            f"{method}: there is no {path}; train one with: outpace train {method} --model MODEL "
            f"--data FILE --out {folder}"
        )
    described: Any = read_json(path)
    if isinstance(described, dict) and ("digest" in described or described.get("format") == FORMAT):
        weights = path.with_name(WEIGHTS)
        check_plain(weights)
        if weights.is_file():  # otherwise ``read_weights`` says so
            described = unsealed(path.parent, described, _mapped(weights))
    found = described.get("method") if isinstance(described, dict) else None
    if found is None:
        raise OutpaceError(f"{path} names no method; train it again")
    if found != method:
        raise OutpaceError(f"{path} is of the method {found!r}, not {method!r}; use the drafter {found}")
    if described.get("format") not in (FORMAT, _UNSEALED):
        raise OutpaceError(
            f"{path} has format {described.get('format')!r}, and this version reads {FORMAT}; train it again"
        )
    config = described.get("config")
    if isinstance(config, dict):
        described["config"] = {_RENAMED.get(name, name): value for name, value in config.items()}
    return dict(described)


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """The tensors in a folder, by name.

    Raises:
        OutpaceError: there is no such file, or it is not in safetensors format.
    """
    path = Path(folder) / WEIGHTS
    check_plain(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutpaceError(f"{path} cannot be read: {error}") from error
