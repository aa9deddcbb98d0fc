"""Checks of a model's files before anything is made from them: its config, its index and its headers.

transformers trusts a config: it makes a module for each of a thousand million layers before it looks for
their weights. An index may name any file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from outpace.core import OutpaceError, first_line
from outpace.files import JSON_BYTES, check_plain, read_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES = 8 * JSON_BYTES  # the largest models have a hundred thousand tensors

_LAYERS = re.compile(r"(?:.*_)?layers?")  # num_hidden_layers, n_layer, decoder_layers
_PARTS = re.compile(r"(?:.*_)?(?:experts|labels|depths?)")
_AT_LEAST_ONE = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS, _MOST_PARTS = 1024, 4096
_SHARED_LAYERS = 64  # layers that a file with fewer tensors may have: layers may share their weights
FLOATS = ("F64", "F32", "F16", "BF16")


def read_config(source: str, trust_remote_code: bool = False) -> Any:
    """transformers' config of a folder or of a name on the hub, after checks of the files in the folder.

    Raises:
        OutpaceError: counts that no model has, or more layers than the weights; an index or a header that
            is broken or names files elsewhere; or weights in numbers that are not floats.
        Exception: whatever transformers raises for a config that it cannot read.
    """
    from transformers import AutoConfig, PreTrainedConfig

    folder = Path(source)
    if (file := folder / CONFIG).is_file():
        found = read_json(file)
        if not isinstance(found, dict):
            raise OutpaceError(f"{file} is not a config: it is not a JSON object")
        if not isinstance(kind := found.get("model_type", ""), str | None):
            raise OutpaceError(f"{file}: model_type is {str(kind)[:80]}; it should be the name of a family")
        check_counts(found, str(file), check_weights(folder, found))
    else:
        check_counts(PreTrainedConfig.get_config_dict(source)[0], source)
    return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def check_counts(config: Mapping[str, Any], where: str, tensors: int | None = None) -> None:
    """Refuse counts of parts that no model has, before a part is made for each.

    Args:
        where: the file's name, for messages.
        tensors: number of tensors in the weights, if known: most layers have several of their own.

    Raises:
        OutpaceError: the message names the entry.
    """
    layers = _MOST_LAYERS if tensors is None else max(tensors, _SHARED_LAYERS)
    for name, value in _entries(config):
        if type(value) is not int:
            continue
        if _LAYERS.fullmatch(name) and value > layers:
            least = "" if tensors is None else f", and its weights have {tensors} tensors"
            raise OutpaceError(f"{where}: {name} is {_short(value)}{least}; give the config of these weights")
        if _PARTS.fullmatch(name) and value > _MOST_PARTS:
            raise OutpaceError(f"{where}: {name} is {_short(value)}; at most {_MOST_PARTS} are supported")
        if name in _AT_LEAST_ONE and value < 1:
            raise OutpaceError(f"{where}: {name} is {_short(value)}; a model has at least one layer")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All entries of a config and of the configs in it."""
    for name, entry in value.items():
        yield name, entry
        if isinstance(entry, dict):
            yield from _entries(entry)


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**15 else "a number of more than 15 digits"


def check_weights(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Check a folder's index and the headers of its weights; return the number of tensors.

    None if there are no weights in safetensors format.

    Raises:
        OutpaceError: the index is not one, or names files elsewhere or missing ones; a header is broken; or
            weights are not floats although the config names no quantisation.
    """
    files = weight_files(folder)
    if not files:
        return None
    quantised = any(name in ("quantization_config", "compression_config") for name, _ in _entries(config))
    count = 0
    for file in files:
        for name, kind in header(file).items():
            count += 1
            if kind not in FLOATS and name.endswith(".weight") and not quantised:
                raise OutpaceError(
                    f"{file}: tensor {name!r} is of {kind}, and {CONFIG} names no quantisation; weights are "
                    f"of {', '.join(FLOATS)}"
                )
    return count


def weight_files(folder: Path) -> list[Path]:
    """A folder's weights in safetensors format: one file, or those that its index names; empty for none.

    Raises:
        OutpaceError: the index is not one, or names files elsewhere or missing ones.
    """
    single = folder / WEIGHTS
    if single.is_file():
        return [single]
    return _shards(folder) if (folder / INDEX).is_file() else []


def _shards(folder: Path) -> list[Path]:
    """The files that an index names."""
    file = folder / INDEX
    found = read_json(file, INDEX_BYTES)
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files:
        raise OutpaceError(f"{file} is not an index: it has no weight_map from tensors to files")
    names = set[str]()
    for tensor, name in files.items():
        if not isinstance(name, str) or not _inside(name):
            raise OutpaceError(
                f"{file} names {str(name)[:80]!r} for {tensor[:80]!r}; a shard is a .safetensors file in the "
                "same folder"
            )
        names.add(name)
    shards = [folder / name for name in sorted(names)]
    for shard in shards:
        if not shard.is_file():
            raise OutpaceError(f"{file} names {shard.name}, which is missing; fetch the model again")
    if not isinstance(found.get("metadata"), dict):
        raise OutpaceError(f'{file} has no metadata, which transformers reads; add "metadata": {{}} to it')
    return shards


def _inside(name: str) -> bool:
    """True for a path of a .safetensors file below the folder that it is relative to."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
    return plain and path.suffix == ".safetensors" and len(name) < 256


def header(file: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file, in the format's notation.

    Raises:
        OutpaceError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    check_plain(file)
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise OutpaceError(f"{file} cannot be read: {first_line(error)}; fetch it again") from error
