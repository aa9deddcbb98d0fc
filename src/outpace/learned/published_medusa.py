"""Published Medusa heads in the format of FasterDecoding/Medusa: config.json, ``medusa_lm_head.safetensors``.

Heads are named by number: ``0.0.linear.weight`` and ``0.0.linear.bias`` are the first residual layer of the
first head, ``0.1.weight`` is its vocabulary projection; in the checkpoint of a whole model they are under
``medusa_head.``. The number of heads is that of the tensors, since published configs have named fewer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.core import OutpaceError
from outpace.learned.published import config_of, head_tensors

_NAME = re.compile(r"(\d+)\.(\d+)\.((?:linear\.)?)(weight|bias)")


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of published heads; None for anything else."""
    config = config_of(folder)
    return config if "medusa_num_heads" in config else None


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], int, int]:
    """The heads' tensors by outpace's names, the number of heads, and the number of residual layers per head.

    Raises:
        OutpaceError: there are no safetensors with heads, or a tensor has an unknown name.
    """
    found = head_tensors(folder, "medusa_lm_head", "medusa", "medusa_head.")
    names = {name: _NAME.fullmatch(name) for name in found}
    unknown = sorted(name for name, matched in names.items() if matched is None)
    if unknown or not found:
        what = f"an unknown tensor {unknown[0]!r}" if unknown else "no tensors of heads"
        raise OutpaceError(f"medusa: there is {what} in {folder}; heads are named as in 0.0.linear.weight")
    matches = {name: matched for name, matched in names.items() if matched is not None}
    heads = 1 + max(int(matched[1]) for matched in matches.values())
    layers = max(int(matched[2]) for matched in matches.values())
    renamed = {
        f"blocks.{one[1]}.{one[2]}.linear.{one[4]}" if one[3] else f"projections.{one[1]}.{one[4]}": found[
            name
        ]
        for name, one in matches.items()
    }
    return renamed, heads, layers
