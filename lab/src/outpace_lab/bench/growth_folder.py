"""A grown model as a folder that transformers loads: written shard by shard, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from outpace.core import OutpaceError, first_line
from outpace.files import beside, read_json
from outpace_lab.bench.growth import Growth

GROWTH = "growth.json"
_INDEX = "model.safetensors.index.json"


def check_folder(out: Path) -> None:
    """Check that a folder is empty or can be made.

    Raises:
        OutpaceError: it is not empty, or cannot be made.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise OutpaceError(f"{out} exists and would be lost; give another --out")
    if not out.parent.is_dir():
        raise OutpaceError(f"cannot write {out}: no such folder: {out.parent}")


def shape_of(folder: str | Path) -> str | None:
    """Read the name of the shape that a folder's model was grown to; None if it was not grown.

    Raises:
        OutpaceError: the folder's ``growth.json`` is broken.
    """
    note = Path(folder) / GROWTH
    if not note.is_file():
        return None
    try:
        return str(read_json(note)["like"])
    except (OutpaceError, KeyError, TypeError) as error:
        raise OutpaceError(
            f"{note} is broken ({first_line(error)}); grow the model anew, or delete that file"
        ) from None


def save(
    growth: Growth,
    tokenizer: Any,
    out: Path,
    facts: dict[str, Any],
    shard_size: int | str = "2GB",
    report: Callable[[], None] = lambda: None,
) -> int:
    """Write a grown model and its tokenizer, with one shard in memory at a time.

    Args:
        out: the folder, new or empty.
        facts: contents of ``growth.json``, on the origin of the model.
        shard_size: maximum size of a shard, in bytes or as in ``2GB``; a larger tensor gets its own shard.
        report: called after each tensor.

    Returns:
        The number of shards.

    Raises:
        OutpaceError: the folder cannot be written, or the disk is too full.
    """
    check_folder(out)
    empty = {
        name: torch.empty(size, dtype=growth.dtype, device="meta") for name, size in growth.names.items()
    }
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_size)
    total = growth.parameters * growth.dtype.itemsize
    free = shutil.disk_usage(out.parent).free
    if total >= free:
        raise OutpaceError(
            f"the grown model has {total / 1e9:.1f} GB, and {out.parent} {free / 1e9:.1f} GB of room; choose "
            "another place, --dtype bfloat16, or a smaller shape"
        )
    draft = beside(out)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        growth.config.architectures = [growth.model_class.__name__]
        growth.config.save_pretrained(draft)
        growth.generation_config.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / GROWTH).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = growth.tensor(name)
                report()
            save_file(shard, draft / file, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (draft / _INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        if out.is_dir():
            out.rmdir()
        draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return len(split.filename_to_tensors)
