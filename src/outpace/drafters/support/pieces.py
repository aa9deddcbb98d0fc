"""Tokens as bytes, so that those of two tokenizers can be compared."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_SPACES = {"\u2581": " "}  # how sentencepiece writes a space


def pieces(tokenizer: Any) -> dict[bytes | str, int]:
    """Map the bytes of each token, or the name of a special token (a string), to its id.

    Supports the two common notations of tokens: GPT-2's, a character per byte, and sentencepiece's, plain
    characters with some tokens for bytes. Other notations are taken literally.
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
    """Map the name of each special token to its id."""
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for place, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            found[token.content] = place
    return found


def disagreement(first: Any, second: Any) -> tuple[int, str, str] | None:
    """The first id for which two tokenizers have different tokens, and the two tokens; None if there is none.

    One may have tokens that the other lacks: special ones are often added later.
    """
    ours, theirs = ({place: token for token, place in t.get_vocab().items()} for t in (first, second))
    for place in sorted(ours.keys() & theirs.keys()):
        if ours[place] != theirs[place]:
            return place, ours[place], theirs[place]
    return None


def _writes_bytes(vocabulary: dict[str, int]) -> bool:
    """True if tokens are written with a character per byte, so that no token contains a space."""
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
    """Map each character of GPT-2's vocabulary to its byte.

    Printable bytes are represented by their own characters, the others by characters from 256 on.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
