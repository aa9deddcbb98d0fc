"""A prefix cache in a file, from which another process of the same model goes on.

Rows depend on weights, dtype, kernels and the processor. So the first rows are compared with those that the
model computes here; all are compared with digests of what was written. They are used only if both agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.cache import Cache
from outpace.core import OutpaceError, first_line
from outpace.engine.prefix import BLOCK, Entry
from outpace.files import digest_of, replacing, sealed, unsealed, why_foreign
from outpace.targets import TargetModel
from outpace.targets.batch import Batch

NAME = "prefixes.safetensors"
# The names, in the file, of the list of blocks, of what is said of them, of what they depend on, of digests.
_LISTED, _WRITTEN, _ABOUT, _PARTS = "blocks", "written", "about", "tensors"
_CHECKED = 512  # rows that are computed again
_CLOSE = 1e-3  # relative; of steps that are not bit-exact


def private(folder: Path) -> Path:
    """A folder that this user alone may read and write, made if it is not there.

    Raises:
        OutpaceError: it cannot be made, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = why_foreign(folder.stat())
    except OSError as error:
        raise OutpaceError(f"cannot use {folder}: {error.strerror or error}") from None
    if why:
        raise OutpaceError(f"{folder} keeps what users sent, and {why}; make it yours alone (chmod 700)")
    return folder


def write(folder: Path, entries: Iterable[Entry], about: Mapping[str, str]) -> None:
    """Write blocks whose rows are tensors.

    Raises:
        OutpaceError: the file cannot be written.
    """
    tensors, listed = dict[str, Tensor](), list[Any]()
    for number, before, tokens, rows in entries:
        listed.append([number, _shown(before), [_shown(token) for token in tokens]])
        tensors |= {f"{number}.{place}": one.cpu() for place, one in enumerate(rows)}
    tensors[_LISTED] = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
    described = sealed({_ABOUT: dict(about), _PARTS: {name: _digest(one) for name, one in tensors.items()}})
    path = private(folder) / NAME
    with replacing(path, 0o600) as part:
        try:
            save_file(tensors, part, {_WRITTEN: json.dumps(described)})
        except SafetensorError as error:  # of a full disk too
            raise OutpaceError(f"cannot write {path}: {first_line(error)}") from error
        part.chmod(0o600)


def read(folder: Path, about: Mapping[str, str], target: TargetModel, cache: Cache) -> list[Entry]:
    """The blocks of a file; none if there is no file.

    Raises:
        OutpaceError: it cannot be read, or is of another model, version or machine; the message says why.
    """
    path = private(folder) / NAME
    if not path.exists():
        return []
    try:
        with safe_open(path, "pt") as file:
            described = unsealed(path, json.loads((file.metadata() or {}).get(_WRITTEN, "{}")))
            written, parts = described[_ABOUT], described[_PARTS]
            if other := sorted(name for name in {*about, *written} if about.get(name) != written.get(name)):
                raise OutpaceError(f"{path} was written with another {' and another '.join(other)}")
            if damaged := sorted(parts.keys() ^ set(file.keys())):
                raise OutpaceError(f"{path} is damaged: it has other tensors than were written, {damaged[0]}")

            def tensor(name: str) -> Tensor:
                found: Tensor = file.get_tensor(name)
                if _digest(found) != parts[name]:
                    raise OutpaceError(f"{path} is damaged: {name} is not what was written")
                return found

            listed = json.loads(tensor(_LISTED).numpy().tobytes())
            places = sorted({name.partition(".")[2] for name in file.keys() if name != _LISTED}, key=int)  # noqa: SIM118
            entries = [
                Entry(
                    number,
                    _key(before),
                    tuple(map(_key, tokens)),
                    [tensor(f"{number}.{place}").to(target.device) for place in places],
                )
                for number, before, tokens in listed
            ]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, OutpaceError):
            raise
        raise OutpaceError(f"cannot read {path}: {first_line(error)}") from error
    _check(path, entries, target, cache)
    return entries


def _check(path: Path, entries: list[Entry], target: TargetModel, cache: Cache) -> None:
    """Compare the first blocks of a text with rows that the model computes."""
    chain = _chain(entries)
    if entries and not chain:
        raise OutpaceError(f"{path} has no text that rows of this model could be compared with")
    tokens = [token for entry in chain for token in entry.tokens if isinstance(token, int)]
    if not tokens:
        return
    slot = target.open(cache, None, len(tokens))
    try:
        target.forward(cache, Batch.of({slot: tokens}, None))
        cache.keep({slot: range(len(tokens))})
        for place, entry in enumerate(chain):
            found = cache.read_rows(slot, BLOCK * place, BLOCK * (place + 1))
            if len(found) != len(entry.rows) or not all(
                _agree(one, other, target.bit_exact) for one, other in zip(found, entry.rows, strict=False)
            ):
                raise OutpaceError(f"{path} has other rows than this model gives here")
    finally:
        cache.free(slot)


def _chain(entries: list[Entry]) -> list[Entry]:
    """The first blocks, of text alone, of the text that was used last."""
    by_number = {entry.number: entry for entry in entries}
    for entry in reversed(entries):
        chain = [entry]
        while isinstance(chain[0].before, int) and chain[0].before in by_number:
            chain.insert(0, by_number[chain[0].before])
        if not isinstance(chain[0].before, int):
            words = list(takewhile(lambda one: all(isinstance(key, int) for key in one.tokens), chain))
            if words:
                return words[: _CHECKED // BLOCK]
    return []


def _agree(one: Tensor, other: Tensor, exactly: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) if exactly else torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE)


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return digest_of(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), flat.numpy())


def _shown(key: Any) -> Any:
    """A key as JSON: tuples as lists, bytes as objects."""
    if isinstance(key, tuple):
        return [_shown(part) for part in key]
    return {"hex": key.hex()} if isinstance(key, bytes) else key


def _key(shown: Any) -> Any:
    if isinstance(shown, list):
        return tuple(map(_key, shown))
    return bytes.fromhex(shown["hex"]) if isinstance(shown, dict) else shown
