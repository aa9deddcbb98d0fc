"""The memory that a model will take, from the sizes of its files, before it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from outpace import hub
from outpace.core import OutpaceError
from outpace.files import read_json
from outpace.loading.placement import device_of, dtype_of
from outpace.loading.weights import own_dtype, reads_rounded
from outpace.names import ADAPTER, GGUF_PART, is_gguf, source_of
from outpace.targets.weights import adapters

_SPARE = 1.25  # of what files and weights take: buffers, the tokenizer, steps
_INDEX = "model.safetensors.index.json"


def bytes_of(name: str | None, dtype: str = "auto", device: str | None = None) -> int:
    """Bytes of memory that a model will take on its device once it is loaded, without rows of texts.

    On a CPU its files, which are mapped, and the weights in the layout and the dtype of its steps.

    Args:
        name, dtype, device: as for ``outpace.load``.

    Raises:
        OutpaceError: its files are not on this machine.
    """
    try:
        files = sum(path.stat().st_size for path in weights_of(name))
    except OSError as error:
        raise OutpaceError(
            f"{name} is not whole: {error.filename} cannot be read: {error.strerror}"
        ) from None
    if is_gguf(name or ""):
        return int(_SPARE * 2 * files)  # llama.cpp may lay out weights anew, too
    place, own = device_of(device), own_dtype(name)
    held = dtype_of(dtype, place, own)
    rounded = reads_rounded(name)
    growth = held.itemsize / own.itemsize if own and isinstance(held, torch.dtype) and not rounded else 1
    return int(_SPARE * files * (growth + (place.type == "cpu")))


def weights_of(name: str | None) -> list[Path]:
    """The files of a model's weights, with those of the model that low-rank updates are for.

    Raises:
        OutpaceError: they are not on this machine.
    """
    if is_gguf(name or ""):
        found = hub.here(name or "") if hub.is_quantised(name or "") else Path(name or "").expanduser()
        return _parts(_there(name, found))
    folder = Path(source_of(name))
    if not folder.is_dir():
        folder = _there(name, hub.here(str(folder)))
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return [*_safetensors(folder), *weights_of(adapters.base_of(folder))]
    return _safetensors(folder)


def _parts(first: Path) -> list[Path]:
    """The parts of a GGUF file."""
    if (part := GGUF_PART.search(first.name)) is None:
        return [first]
    begin = first.name[: part.start()]
    return [
        first.with_name(f"{begin}-{number:05}-of-{part[2]}.gguf") for number in range(1, int(part[2]) + 1)
    ]


def _safetensors(folder: Path) -> list[Path]:
    """The files that a folder's weights are loaded from."""
    if (index := folder / _INDEX).is_file():
        named = read_json(index).get("weight_map", {})
        return [folder / file for file in sorted(set(named.values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _there(name: str | None, found: Path | None) -> Path:
    if found is None or not found.exists():
        raise OutpaceError(f"{name} is not on this machine; fetch it: outpace pull {name}")
    return found
