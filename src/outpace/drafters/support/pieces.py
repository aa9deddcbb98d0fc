"""The tokens of a tokenizer as bytes, so that those of two tokenizers can be compared."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_SPACES = {"\u2581": " "}  # how sentencepiece writes a space


def pieces(tokenizer: Any) -> dict[bytes | str, int]:
    """The id of each token of a tokenizer by its bytes, and of special tokens by their name, a string.

    Reads the two common ways of writing tokens: GPT-2's, a character per byte, and sentencepiece's,
    characters as they are with some tokens for bytes. Tokens written in another way are taken literally.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = special_tokens(tokenizer)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    by_byte = _writes_bytes(vocabulary)
    found: dict[bytes | str, int] = {}
    for token, place in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token in special:
            found[token] = place
        else:
            found.setdefault(token.encode() if token in added else _bytes(token, by_byte), place)
    return found


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The id of each token that is no text, by its name."""
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for place, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            found[token.content] = place
    return found


def disagreement(first: Any, second: Any) -> tuple[int, str, str] | None:
    """The first id for which two tokenizers have different tokens, and those; None if there is none.

    One may have tokens that the other lacks: special ones are often added later.
    """
    ours, theirs = ({place: token for token, place in t.get_vocab().items()} for t in (first, second))
    for place in sorted(ours.keys() & theirs.keys()):
        if ours[place] != theirs[place]:
            return place, ours[place], theirs[place]
    return None


def _writes_bytes(vocabulary: dict[str, int]) -> bool:
    """True if tokens are written with a character per byte: then no space appears as such."""
    letters = _letters()
    marked = any(token.startswith("\u0120") for token in vocabulary)
    return marked and sum(all(c in letters for c in token) for token in vocabulary) > len(vocabulary) // 2


def _bytes(token: str, by_byte: bool) -> bytes:
    letters = _letters()
    if by_byte and all(character in letters for character in token):
        return bytes(letters[character] for character in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    for mark, meant in _SPACES.items():
        token = token.replace(mark, meant)
    return token.encode()


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The byte that each character represents in GPT-2's vocabulary: printable ones represent themselves, the
    others are numbered from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
