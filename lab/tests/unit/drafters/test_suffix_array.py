"""The suffix array against sorting the suffixes, and its search against looking at every place."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import OutpaceError
from outpace_lab.datastores.suffix_array import (
    NOWHERE,
    Bytes,
    SuffixArray,
    bytes_per_token,
    from_bytes,
    key_of,
    sort_suffixes,
    to_bytes,
)

# A few tokens each, so that they repeat: small ones, around the limits of a byte, and the largest of a width.
ALPHABETS = [[0, 1], [0, 1, 2, 255], [0, 254, 255, 256, 257], [65535, 65536, 131071, 131072, 2**24 - 1]]
TEXTS = st.sampled_from(ALPHABETS).flatmap(lambda tokens: st.lists(st.sampled_from(tokens), max_size=60))


def encoded(text: Sequence[int], width: int = 0) -> Bytes:
    return np.ascontiguousarray(
        to_bytes(np.array(text, np.int64), width or bytes_per_token(max(text, default=0)))
    )


def order_of(text: Bytes) -> list[int]:
    return [place for some in sort_suffixes(text) for place in some.tolist()]


def array(text: Sequence[int], width: int = 0) -> SuffixArray:
    rows = encoded(text, width)
    return SuffixArray(rows, np.array(order_of(rows), np.uint32))


@given(TEXTS, st.integers(0, 1))
def test_places_are_in_the_order_of_their_suffixes(text: list[int], wider: int) -> None:
    rows = encoded(text, bytes_per_token(max(text, default=0)) + wider)
    assert order_of(rows) == sorted(range(len(text)), key=lambda place: text[place:])


def test_sorts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 300, 500).tolist()
    monkeypatch.setattr("outpace_lab.datastores.suffix_array._AT_ONCE", 7)
    assert order_of(encoded(text)) == sorted(range(500), key=lambda place: text[place:])


@given(TEXTS)
def test_tokens_survive_as_bytes(text: list[int]) -> None:
    assert from_bytes(encoded(text)).tolist() == text
    assert key_of(text, 3) == encoded(text, 3).tobytes()


@pytest.mark.parametrize(
    ("largest", "width"), [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 3), (2**24, 4)]
)
def test_a_token_takes_the_fewest_bytes(largest: int, width: int) -> None:
    assert bytes_per_token(largest) == width


@given(TEXTS, st.data())
def test_longest_is_what_a_scan_finds(text: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from([*text, 5, 256]), max_size=6))
    found = array(text, 3).longest(key_of(wanted, 3))
    for length in range(len(wanted), 0, -1):
        places = [i for i in range(len(text)) if text[i : i + length] == wanted[:length]]
        if places:
            assert found.length == length
            assert sorted(array(text, 3).order[found.first : found.last].tolist()) == places
            return
    assert found == NOWHERE


def test_a_search_grows_with_the_logarithm_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(1).integers(0, 4, 2**16).tolist()
    suffixes = array(text)
    read, reads = SuffixArray._read, []
    monkeypatch.setattr(
        SuffixArray, "_read", lambda self, start, size: reads.append(size) or read(self, start, size)
    )
    assert suffixes.longest(key_of(text[100:140], 1)).length == 40
    assert len(reads) <= 3 * 17 + 2


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(OutpaceError, match=r"pip install .*lab\[datastore\]"):
        list(sort_suffixes(encoded([1, 2])))


def test_an_error_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: Bytes) -> Bytes:
        raise RuntimeError("libdivsufsort error")

    monkeypatch.setitem(sys.modules, "pydivsufsort", types.SimpleNamespace(divsufsort=fail))
    with pytest.raises(RuntimeError, match="libdivsufsort"):
        list(sort_suffixes(encoded([1, 2])))


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_does_not_wait_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    release, elsewhere = threading.Event(), []

    def sort(text: Bytes) -> Bytes:
        elsewhere.append(threading.current_thread() is not threading.main_thread())
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(60)
        return text

    monkeypatch.setitem(sys.modules, "pydivsufsort", types.SimpleNamespace(divsufsort=sort))
    # Whoever started this process may have made it deaf to interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(sort_suffixes(encoded([1, 2])))
    finally:
        signal.signal(signal.SIGINT, before)
    assert elsewhere == [True] and not release.is_set()
    release.set()
