"""Published Hydra heads in the format of zankner/Hydra: config.json, ``hydra_lm_head.safetensors``.

``hydra_mlp.0.0.linear`` and ``hydra_mlp.0.0.res_connection`` are the first layer of the first head,
``hydra_mlp.0.1.linear`` is a residual layer, ``hydra_lm_head.0`` the vocabulary projection. Layers of dropout
take numbers too, so a head's layers are counted in the order of their numbers. The residual layers of a head
are one and the same there, so a file may have only the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.learned.published import config_of, head_tensors

_LAYER = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of published heads; None for anything else."""
    config = config_of(folder)
    return config if "hydra_num_heads" in config else None


def read_tensors(folder: str | Path, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    """The heads' tensors by outpace's names, the number of heads, and the number of layers per head.

    Raises:
        OutpaceError: the heads are of another architecture, or a tensor has an unknown name or is missing.
    """
    supported = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise OutpaceError(
                f"hydra: {folder} has {name}={config[name]!r}; only {value!r} is supported (as in ankner/"
                "hydra-vicuna-7b-v1.3, not Hydra++); train heads of your own: outpace train hydra"
            )
    found = head_tensors(folder, "hydra_lm_head", "hydra", "hydra_head.")
    return _renamed(found, Path(folder), int(config.get("hydra_num_layers", 1)))


def _renamed(found: Mapping[str, Tensor], place: Path, layers: int) -> tuple[dict[str, Tensor], int, int]:
    renamed: dict[str, Tensor] = {}
    numbers: dict[int, set[int]] = {}
    for name in found:
        if matched := _LAYER.fullmatch(name):
            numbers.setdefault(int(matched[1]), set()).add(int(matched[2]))
    for name, tensor in found.items():
        if matched := _LAYER.fullmatch(name):
            head = int(matched[1])
            layer = sorted(numbers[head]).index(int(matched[2]))
            if matched[3] == "res_connection":
                own = f"residuals.{head}.{matched[4]}"
            elif layer == 0:
                own = f"first.{head}.{matched[4]}"
            else:
                own = f"blocks.{head}.{layer - 1}.linear.{matched[4]}"
            renamed[own] = tensor
        elif matched := _HEAD.fullmatch(name):
            renamed[f"projections.{matched[1]}.{matched[2]}"] = tensor
        else:
            raise OutpaceError(
                f"hydra: there is an unknown tensor {name!r} in {place}; layers are named as in "
                "hydra_mlp.0.0.linear.weight"
            )
    if not numbers or "projections.0.weight" not in renamed:
        raise OutpaceError(f"hydra: there are no tensors of heads in {place}, or none of their projections")
    for head in numbers:
        for layer in range(1, layers - 1):
            for part in ("weight", "bias"):
                first = renamed.get(f"blocks.{head}.0.linear.{part}")
                if first is not None:
                    renamed.setdefault(f"blocks.{head}.{layer}.linear.{part}", first)
        weight = renamed.get(f"projections.{head}.weight")
        if weight is not None:
            renamed.setdefault(f"projections.{head}.bias", torch.zeros(len(weight), dtype=weight.dtype))
    return renamed, 1 + max(numbers), layers
