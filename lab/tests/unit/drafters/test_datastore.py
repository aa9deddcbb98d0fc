"""A datastore against a scan of its documents, in one shard and in many; its file, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.core import OutpaceError
from outpace_lab.datastores import header, writer
from outpace_lab.datastores.datastore import Datastore, Found
from outpace_lab.datastores.header import SIZE, fingerprint
from outpace_lab.datastores.writer import DatastoreWriter

PLENTY = 1 << 20
DEPTH = 3
Text = list[int]
# One file is written over and over by the examples of one test.
REUSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def write(file: Path, documents: list[Text], vocabulary: int = 300, memory: int = PLENTY) -> Datastore:
    with DatastoreWriter(file, vocabulary, memory) as writer:
        for document in documents:
            writer.add(document)
    return Datastore(file)


def for_rows(rows: int, vocabulary: int = 300) -> int:
    """Memory for shards of so many rows."""
    return rows * (5 * (1 if vocabulary < 256 else 2) + 2)


def said(found: Found) -> tuple[int, int, Counter[tuple[int, ...]]]:
    """A result, with sorted continuations and without their padding."""
    texts = (tuple(token for token in row if token >= 0) for row in found.continuations.tolist())
    return found.length, found.count, Counter(texts)


def scan(documents: list[Text], text: Text, most: int) -> tuple[int, int, Counter[tuple[int, ...]]]:
    """The result that a datastore should return, by looking at every place of every document."""
    for length in range(min(most, len(text)), 0, -1):
        places = [
            tuple(document[i + length : i + length + DEPTH])
            for document in documents
            for i in range(len(document) - length)  # something must follow
            if document[i : i + length] == text[-length:]
        ]
        if places:
            return length, len(places), Counter(places)
    return 0, 0, Counter()


DOCUMENTS = st.lists(st.lists(st.sampled_from([0, 1, 2, 255, 256, 299]), max_size=12), min_size=1, max_size=8)
QUERY = st.lists(st.sampled_from([0, 1, 2, 255, 256, 299]), min_size=1, max_size=8)


@REUSE
@given(documents=DOCUMENTS, text=QUERY, most=st.integers(1, 8), rows=st.sampled_from([13, 25, 1000]))
def test_finds_what_a_scan_finds(
    tmp_path: Path, documents: list[Text], text: Text, most: int, rows: int
) -> None:
    """No document is longer than a shard here: 12 tokens and its end."""
    if not any(documents):
        return
    datastore = write(tmp_path / "d", documents, memory=for_rows(rows))
    datastore.verify()
    assert said(datastore.look_up(text, most, 1, 1000, DEPTH)) == scan(documents, text, most)


def test_shards_find_what_one_array_finds(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.zipf(1.5, size).clip(max=299).tolist() for size in random.integers(1, 40, 200)]
    one = write(tmp_path / "one", documents)
    many = write(tmp_path / "many", documents, memory=for_rows(100))
    assert len(one.header.shards) == 1 and len(many.header.shards) > 20
    assert (one.header.tokens, one.header.documents) == (many.header.tokens, many.header.documents)
    for document in documents:
        for store in (one, many):
            store.verify()
        assert said(one.look_up(document[:-1], occurrences=10_000)) == said(
            many.look_up(document[:-1], occurrences=10_000)
        )


def test_a_document_longer_than_a_shard_is_cut(tmp_path: Path) -> None:
    text = list(range(100))
    datastore = write(tmp_path / "d", [text], memory=for_rows(30))
    assert (datastore.header.tokens, datastore.header.documents) == (100, 1)
    found = [datastore.look_up(text[: end + 1], depth=1).continuations for end in range(99)]
    cuts = [end for end, rows in enumerate(found) if not len(rows)]
    assert cuts == [28, 57, 86]  # a row of each shard ends it
    assert all(rows.tolist() == [[end + 1]] for end, rows in enumerate(found) if end not in cuts)


def test_no_match_and_no_continuation_crosses_the_end_of_a_document(tmp_path: Path) -> None:
    datastore = write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    assert datastore.look_up([1, 2], depth=4).continuations.tolist() == [[3, -1, -1, -1]]
    assert datastore.look_up([3, 4]).length == 1  # 3 and 4 are not neighbours
    assert datastore.look_up([1, 2, 3]).length == 0  # nothing follows


def test_pieces_make_one_document(tmp_path: Path) -> None:
    with DatastoreWriter(tmp_path / "d", 300) as writer:
        writer.add([1, 2], last=False)
        writer.add(np.array([3], np.uint16), last=False)
        writer.add([], last=True)
        writer.add([])
        writer.add([4], last=False)  # the end of the text ends the document
    datastore = Datastore(tmp_path / "d")
    assert (datastore.header.tokens, datastore.header.documents) == (4, 2)
    assert datastore.look_up([1], depth=3).continuations.tolist() == [[2, 3, -1]]


@pytest.mark.parametrize("rows", [1000, 50])
def test_occurrences_looked_at_are_spread_evenly(tmp_path: Path, rows: int) -> None:
    """Places are ordered by what precedes them: 30 times 7, 60 times 8, 10 times 9."""
    documents = [
        [before, 1, after] for before, after, n in ((7, 7, 30), (8, 8, 60), (9, 9, 10)) for _ in range(n)
    ]
    datastore = write(tmp_path / "d", documents, memory=for_rows(rows))
    found = datastore.look_up([1], occurrences=10, depth=1)
    assert (found.length, found.count) == (1, 100)
    assert Counter(found.continuations[:, 0].tolist()) == {7: 3, 8: 6, 9: 1}


def test_a_match_is_no_longer_and_no_shorter_than_wanted(tmp_path: Path) -> None:
    datastore = write(tmp_path / "d", [[1, 2, 3, 4], [9, 3, 5]])
    assert datastore.look_up([1, 2, 3]).length == 3
    assert datastore.look_up([1, 2, 3], max_ngram=1).count == 2
    assert datastore.look_up([8, 3], min_ngram=1).length == 1
    none = datastore.look_up([8, 3], min_ngram=2, depth=5)
    assert (none.length, none.count, none.continuations.shape) == (0, 0, (0, 5))


def test_tokens_it_cannot_hold_match_nothing(tmp_path: Path) -> None:
    datastore = write(tmp_path / "d", [[1, 2, 254]], vocabulary=255)
    assert datastore.look_up([1, 255]).length == 0
    assert datastore.look_up([255, 1]).length == 1
    assert datastore.look_up([1_000_000, 2]).continuations[0, 0] == 254
    assert datastore.look_up([]).length == 0


def test_large_vocabularies(tmp_path: Path) -> None:
    last = 2**18 - 1
    datastore = write(tmp_path / "d", [[0, last, 2**17, 5]], vocabulary=2**18)
    assert datastore.header.width == 3
    assert datastore.look_up([0, last], depth=2).continuations.tolist() == [[2**17, 5]]


# -- processes -------------------------------------------------------------------------------------------


def findings(file: Path, barrier: object) -> list[object]:
    datastore = Datastore(file)
    barrier.wait(60)  # type: ignore[attr-defined]
    found = [datastore.look_up([a, b]).continuations.tolist() for a in range(20) for b in range(20)]
    barrier.wait(60)  # type: ignore[attr-defined]
    return found


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both have it open from before the first look-up of either to after the last."""
    random = np.random.default_rng(1)
    write(tmp_path / "d", [random.integers(0, 20, 50).tolist() for _ in range(20)])
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(1) as pool:
        barrier = manager.Barrier(2)
        other = pool.apply_async(findings, (tmp_path / "d", barrier))
        first = findings(tmp_path / "d", barrier)
        assert first == other.get(60)
    assert any(first)


def test_a_reader_keeps_what_it_opened_when_the_file_is_replaced(tmp_path: Path) -> None:
    before = write(tmp_path / "d", [[1, 2, 3]])
    after = write(tmp_path / "d", [[1, 7]])
    assert before.look_up([1]).continuations[0, 0] == 2
    assert after.look_up([1]).continuations[0, 0] == 7


# -- refusals --------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write(tmp_path / "good", [[1, 2, 3], [4, 5]])
    return tmp_path / "good"


@pytest.mark.parametrize("missing", [1, 4, 20])
def test_a_truncated_file(good: Path, missing: int) -> None:
    good.write_bytes(good.read_bytes()[:-missing])
    with pytest.raises(OutpaceError, match="is truncated: it has"):
        Datastore(good)


def test_every_shorter_file_is_refused(good: Path) -> None:
    whole = good.read_bytes()
    for size in (0, 1, 7, 8, 20, 100, SIZE - 1, SIZE, len(whole) - 1):
        good.write_bytes(whole[:size])
        with pytest.raises(OutpaceError, match=r"truncated|not a datastore"):
            Datastore(good)


def test_a_file_that_is_too_long(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"\0")
    with pytest.raises(OutpaceError, match="damaged"):
        Datastore(good)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x93NUMPY" + bytes(100_000), b"\x89PNG\r\n\x1a\n" + bytes(100_000)]
)
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(OutpaceError, match="foreign is not a datastore"):
        Datastore(tmp_path / "foreign")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nothing", "cannot read the datastore"), (tmp_path, "is a folder")):
        with pytest.raises(OutpaceError, match=words):
            Datastore(path)


def test_a_damaged_header(good: Path) -> None:
    content = bytearray(good.read_bytes())
    place = content.index(b'"vocabulary": 300') + len(b'"vocabulary": ')
    content[place] = ord("9")
    good.write_bytes(content)
    with pytest.raises(OutpaceError, match="does not match its checksum"):
        Datastore(good)


def test_another_version(good: Path) -> None:
    content = bytearray(good.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    good.write_bytes(content)
    with pytest.raises(OutpaceError, match="format 2, and this version of outpace reads format 1"):
        Datastore(good)


@pytest.mark.parametrize("place", [SIZE, SIZE + 5, -1])
def test_damage_behind_the_header_is_found_by_verify(good: Path, place: int) -> None:
    Datastore(good).verify()
    content = bytearray(good.read_bytes())
    content[place] ^= 1
    good.write_bytes(content)
    with pytest.raises(OutpaceError, match="is damaged between bytes"):
        Datastore(good).verify()


def test_the_header_says_what_is_there(tmp_path: Path) -> None:
    with DatastoreWriter(tmp_path / "d", 70_000, tokenizer="ours", fingerprint="f00") as writer:
        writer.add([1, 2, 3])
    header = Datastore(tmp_path / "d").header
    assert (header.vocabulary, header.width, header.tokens, header.documents) == (70_000, 3, 3, 1)
    assert (header.tokenizer, header.fingerprint) == ("ours", "f00")
    content = (tmp_path / "d").read_bytes()
    _, _, length, checksum = struct.unpack_from("<8sIII", content)
    text = content[20 : 20 + length]
    assert zlib.crc32(text) == checksum and json.loads(text)["shards"][0][:2] == [4, 2]
    assert header.file_bytes == len(content)


def test_the_fingerprint_is_of_tokens_and_their_ids() -> None:
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    others = [{"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 10}]
    assert len({fingerprint(v) for v in others} | {fingerprint({"a": 0, "b": 1})}) == 5


# -- writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("shards", [0, 3])
def test_an_interrupted_build_leaves_what_was_there(
    good: Path, error: type[BaseException], shards: int
) -> None:
    before = good.read_bytes()
    with pytest.raises(error), DatastoreWriter(good, 300, for_rows(4)) as writer:
        for _ in range(1 + shards):
            writer.add([1, 2, 3])
        assert writer.shards == shards
        raise error
    assert good.read_bytes() == before
    assert [file.name for file in good.parent.iterdir()] == ["good"]


def test_an_interrupt_at_the_end_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "sort_suffixes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "d", [[1, 2, 3]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 300], "token 300 is outside the vocabulary of 300"),
        ([-1], "token -1 is outside"),
        ([1.5], "list of token ids, not of float64"),
        ([2**70], "list of token ids"),
        ([[1, 2]], "list of token ids"),
    ],
)
def test_what_is_no_token_is_refused(tmp_path: Path, document: Text, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        write(tmp_path / "d", [document])
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="contain no tokens"):
        write(tmp_path / "d", [[], []])


def test_too_little_memory(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="give more"):
        write(tmp_path / "d", [[1]], memory=10)
    with pytest.raises(OutpaceError, match="vocabulary"):
        write(tmp_path / "d", [[1]], vocabulary=0)


def test_as_many_shards_as_the_header_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = header.MOST_SHARDS
    documents = [[1, 2]] * most
    assert len(write(tmp_path / "d", documents, memory=for_rows(3)).header.shards) == most
    with pytest.raises(OutpaceError, match="give more memory"):
        write(tmp_path / "e", [*documents, [3, 4]], memory=for_rows(3))


def test_sorting_stays_within_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard's text, and four bytes for each of its bytes, fit."""
    sizes: list[int] = []
    with DatastoreWriter(tmp_path / "d", 300, 12_000, sorting=sizes.append) as writer:
        for _ in range(100):
            writer.add([1, 2, 3] * 30)
    assert len(sizes) > 5 and all(rows * 2 * 5 <= 12_000 for rows in sizes)
