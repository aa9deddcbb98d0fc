"""Published Medusa heads in the format of FasterDecoding/Medusa: config.json, ``medusa_lm_head.safetensors``.

Heads are named by number: ``0.0.linear.weight`` and ``0.0.linear.bias`` are the first residual layer of the
first head, ``0.1.weight`` is its vocabulary projection; in the checkpoint of a whole model they are under
``medusa_head.``. The number of heads is that of the tensors, since published configs have named fewer. vLLM's
format has ``blocks.0.layers.0.weight``, mostly without a bias, and ``lm_heads.0.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.core import OutpaceError
from outpace.learned.published import config_of, head_tensors

_VLLM = re.compile(r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)|lm_heads\.(\d+))\.(weight|bias)")
_NAME = re.compile(r"(\d+)\.(\d+)\.((?:linear\.)?)(weight|bias)")


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of published heads; None for anything else."""
    config = config_of(folder)
    return config if "medusa_num_heads" in config or config.get("model_type") == "medusa" else None


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], int, int]:
    """The heads' tensors by outpace's names, the number of heads, and the number of residual layers per head.

    Raises:
        OutpaceError: there are no safetensors with heads, or a tensor has an unknown name.
    """
    found = _by_number(head_tensors(folder, "medusa_lm_head", "medusa", "medusa_head."))
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


def _by_number(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors in vLLM's format by the other one's names; those of the other format unchanged."""
    matches = {name: matched for name in found if (matched := _VLLM.fullmatch(name))}
    if not matches:
        return found
    layers = 1 + max((int(one[2]) for one in matches.values() if one[2]), default=0)
    renamed = {name: one for name, one in found.items() if name not in matches}
    for name, one in matches.items():
        if one[3]:
            renamed[f"{one[3]}.{layers}.{one[4]}"] = found[name]
            continue
        stem = f"{one[1]}.{one[2]}.linear."
        renamed[stem + one[4]] = found[name]
        if one[4] == "weight":
            renamed.setdefault(stem + "bias", found[name].new_zeros(len(found[name])))
    return renamed
