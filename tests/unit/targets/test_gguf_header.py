"""Headers of GGUF files by fuzzing: one that is none is refused in a line, before llama.cpp reads it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from limits import within_limits
from models import tiny_llama
from outpace.core import OutpaceError
from outpace.targets.llamacpp.header import check_header
from outpace.testing.gguf import write_gguf

pytest.importorskip("gguf", reason="needs outpace[gguf]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(tiny_llama(dtype=torch.float32), path, "float16")
    check_header(path)
    return path.read_bytes()


def fault(data: bytes, folder: Path) -> str:
    """What is wrong with a file's header; empty if nothing is."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    try:
        check_header(path)
    except OutpaceError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return str(error)
    return ""


def place_of(whole: bytes, name: bytes) -> int:
    """Where a tensor's number of axes stands."""
    return whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def number(whole: bytes, name: bytes, value: int) -> bytes:
    """The file with another 32-bit number of this name."""
    changed, at = bytearray(whole), place_of(whole, name)
    assert struct.unpack_from("<I", whole, at) == (4,)
    struct.pack_into("<I", changed, at + 4, value)
    return bytes(changed)


def values(*given: tuple[bytes, int, int]) -> bytes:
    """A file with lists of zeros: name, type of entries, their number."""
    parts = [b"GGUF" + struct.pack("<IQQ", 3, 0, len(given))]
    for name, kind, count in given:
        size = {8: 8, 6: 4, 5: 4}[kind]
        parts.append(struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, count))
        parts.append(bytes(size * count))
    return b"".join(parts)


def test_lists_that_are_shorter_than_the_vocabulary(tmp_path: Path) -> None:
    tokens, scores = b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores"
    assert not fault(values((tokens, 8, 5), (scores, 6, 5)), tmp_path)
    assert "it has 4 scores for 5 tokens" in fault(values((tokens, 8, 5), (scores, 6, 4)), tmp_path)
    assert "it has 4 scores for 0 tokens" in fault(values((scores, 6, 4)), tmp_path)
    assert "is no list of its type" in fault(values((tokens, 5, 5)), tmp_path)


NAME = b"blk.0.ffn_up.weight"


def test_every_fault_is_named(whole: bytes, tmp_path: Path) -> None:
    at = place_of(whole, NAME)  # axes: 4 bytes, then two sizes, a type and a place
    other = place_of(whole, b"blk.1.ffn_up.weight")

    def put(place: int, form: str, value: int) -> bytes:
        changed = bytearray(whole)
        struct.pack_into(form, changed, place, value)
        return bytes(changed)

    for changed, words in (
        (put(4, "<I", 9), "its version is 9"),
        (put(8, "<Q", 10**9), "bytes for 1000000000 tensors"),
        (put(16, "<Q", 10**9), "bytes for 1000000000 values"),
        (put(24, "<Q", 10**12), "the name of a value has 1000000000000 bytes"),
        (put(at, "<I", 5), "has 5 axes"),
        (put(at, "<I", 0), "has 0 axes"),
        (put(at + 4, "<Q", 0), "has sizes [0, "),
        (put(at + 4, "<Q", 1 << 61), "has sizes [2305843009213693952, "),
        (put(at + 20, "<I", 12), "blocks of 256"),
        (put(at + 24, "<Q", 1 << 40), "ends at byte"),
        (put(at + 24, "<Q", 33), "begins at 33, no multiple of 32"),
        (put(at + 24, "<Q", struct.unpack_from("<Q", whole, other + 24)[0]), "overlaps"),
        (put(at - len(NAME) - 8, "<Q", 64), "the name of a tensor has 64 bytes"),
        (whole.replace(b"blk.1.ffn_up.weight", NAME), "two of its tensors have one name"),
        (number(whole, b"llama.attention.head_count", 0), "its attention.head_count is 0"),
        (number(whole, b"llama.block_count", 513), "its block_count is 513, and llama.cpp takes 1 to 512"),
        (number(whole, b"llama.embedding_length", 0), "its embedding_length is 0"),
        (whole[: len(whole) - 64], "ends at byte"),
        (whole[: at + 2], "it ends in its header"),
        (whole[:10], "it ends in its header"),
    ):
        found = fault(changed, tmp_path)
        assert words in found, f"{words!r}, not {found!r}"
        assert "truncated or damaged; fetch it again" in found


def test_a_wrong_number_anywhere_is_refused_or_a_header_still(whole: bytes, tmp_path: Path) -> None:
    """At each of many places of the header, drawn by a seed: huge numbers, small ones, flipped bits, cuts."""
    size = place_of(whole, b"output.weight") + 64
    rng, refused = random.Random(0), 0
    for _ in range(600):
        changed, at = bytearray(whole), rng.randrange(4, size)
        form = rng.randrange(5)
        if form == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif form == 1:
            changed[at : at + 8] = rng.choice((b"\xff" * 8, struct.pack("<Q", 10**9), bytes(8)))
        elif form == 2:
            del changed[at:]
        elif form == 3:
            del changed[at : at + rng.randrange(1, 64)]
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        refused += bool(fault(bytes(changed), tmp_path))
    assert refused > 200


def test_a_long_vocabulary_is_read_in_no_time_and_bounded(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", 8, 200_000) + (struct.pack("<Q", 3) + b"abc") * 200_000
    value = struct.pack("<Q", 6) + b"tokens" + struct.pack("<I", 9) + strings
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value)
    within_limits(lambda: check_header(path))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value[:-5])
    with pytest.raises(OutpaceError, match="it ends in tokens"):
        within_limits(lambda: check_header(path))
