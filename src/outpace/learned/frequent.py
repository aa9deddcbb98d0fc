"""The tokens that are drafted with a head of the whole vocabulary: named, counted in a text, or the first.

The head of a large vocabulary costs more than a small drafter's layers, and most of a text consists of few
tokens: Zhao et al. 2025 (FR-Spec, arXiv 2502.14856); for prediction layers Cai et al. 2025 (FastMTP, arXiv
2509.18362).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.files import check_plain, read_json
from outpace.learned.published import tensors_of
from outpace.reading import token_ids
from outpace.targets.base import TargetModel
from outpace.targets.weights.pretrained import load_tokenizer

_COMMON, _FEW = 1 << 14, 4  # a cut head has at least this number of tokens, and a part of all
_PIECE = 1 << 20  # characters of a text that are read into tokens at once
_KINDS = "their number, a .json file with a list of ids, a .safetensors file with d2t or t2d, or the ids"


def common(size: int) -> int:
    """The number of tokens that a cut head of a vocabulary of this size has."""
    return min(max(size // _FEW, _COMMON), size)


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The ids of the greatest counts, ascending; of equally frequent ones the first."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def drafted_of_tables(tables: Mapping[str, Tensor]) -> Tensor | None:
    """The ids in tables as EAGLE-3 has: ``d2t``, offsets to the ids, or ``t2d``, a mask; None without any."""
    for name, table in sorted(tables.items()):
        if name.rpartition(".")[2] == "d2t":
            return table.long() + torch.arange(len(table))
        if name.rpartition(".")[2] == "t2d":
            return table.nonzero().flatten()
    return None


def drafted_of(given: Any, text: str | Path | None, target: TargetModel, method: str) -> Tensor:
    """The target's ids that are to be drafted, ascending, [n], on its device.

    Args:
        given: their number, the ids, or a file of them; None with a text for as many as ``common``.
        text: a file whose most frequent tokens they are; without it a number takes the first ones, as
            vocabularies begin with the most common tokens.

    Raises:
        OutpaceError: a file cannot be read, or they are no ids of the target.
    """
    size = target.vocabulary
    number = common(size) if given is None else _number(given)
    if text is not None and number is None:
        raise OutpaceError(f"{method}: draft_text goes with a number of tokens; leave draft_vocabulary out")
    if number is None:
        found = _listed(given, method)
    elif not 0 < number <= size:
        raise OutpaceError(f"{method}: draft_vocabulary must be from 1 to {size}, the target's, not {number}")
    elif text is None:
        found = torch.arange(number)
    else:
        found = most_frequent(_counts(Path(text), target, method), number)
    found = torch.unique(found)
    if not len(found) or found[0] < 0 or found[-1] >= size:
        raise OutpaceError(f"{method}: draft_vocabulary must be ids from 0 to {size - 1}, at least one")
    ids: Tensor = found.to(target.hidden.device)
    return ids


def _number(given: Any) -> int | None:
    """A number of tokens; None for anything else."""
    if type(given) is int or (isinstance(given, str) and given.isdecimal()):
        return int(given)
    return None


def _listed(given: Any, method: str) -> Tensor:
    """Ids that are given, or read from a file."""
    found = given
    if isinstance(given, str | Path):
        file = Path(given)
        if not file.is_file():
            raise OutpaceError(f"{method}: there is no file {file}; draft_vocabulary is {_KINDS}")
        if file.suffix == ".safetensors":
            found = drafted_of_tables(tensors_of([file], method))
        elif file.suffix == ".json":
            found = read_json(file)
        else:
            raise OutpaceError(
                f"{method}: draft_vocabulary is {_KINDS}, not {file.name}; a pickle is not read: write its "
                "list as .json; a text goes with draft_text"
            )
    ids = found.tolist() if isinstance(found, Tensor) else found
    if not isinstance(ids, list | tuple | range) or not all(type(one) is int for one in ids):
        raise OutpaceError(f"{method}: draft_vocabulary is {_KINDS}; {str(given)[:80]} has none")
    return torch.tensor(list(ids), dtype=torch.long)


def _counts(file: Path, target: TargetModel, method: str) -> Tensor:
    """How often each of the target's tokens occurs in a text, [vocabulary]."""
    check_plain(file)
    if not file.is_file():
        raise OutpaceError(f"{method}: there is no file {file}; draft_text is a file of text")
    tokenizer = load_tokenizer(None, target, needed=True)
    if tokenizer is None:
        raise OutpaceError(
            f"{method}: draft_text needs the target's tokenizer; give draft_vocabulary, a file of ids"
        )
    counts = torch.zeros(target.vocabulary, dtype=torch.long)
    with file.open(encoding="utf-8", errors="replace") as lines:
        for piece in _pieces(lines):
            ids = torch.tensor(token_ids(tokenizer, piece, special=False), dtype=torch.long)
            counts += ids[ids < len(counts)].bincount(minlength=len(counts))
    return counts


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Lines, joined to pieces of some length."""
    piece: list[str] = []
    length = 0
    for line in lines:
        piece.append(line)
        length += len(line)
        if length >= _PIECE:
            yield "".join(piece)
            piece, length = [], 0
    yield "".join(piece)
