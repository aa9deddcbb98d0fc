"""Odd and damaged datastores, by the tests of outpace's own files."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limits import linux, unless_it_waits
from outpace.core import OutpaceError
from outpace_lab.cli import corpus
from outpace_lab.datastores.datastore import Datastore
from outpace_lab.datastores.header import MAGIC, SIZE
from outpace_lab.datastores.writer import DatastoreWriter
from unit import test_plain_files, test_written
from unit.test_files import BROKEN, HUGE, in_file, odd, survives, sweep
from unit.test_written import TEXT, Kind

pytestmark = linux
folder = test_written.folder  # a fixture

FRONT = struct.Struct("<8sIII")


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("datastores") / "own"
    with DatastoreWriter(file, 97, tokenizer="t") as writer:
        writer.add([1, 2, 3, 1, 2, 3, 4])
        writer.add([5, 6])
    return file.read_bytes()


def header_of(raw: bytes) -> dict[str, Any]:
    size = FRONT.unpack_from(raw)[2]
    found: dict[str, Any] = json.loads(raw[FRONT.size : FRONT.size + size])
    return found


def with_header(raw: bytes, text: bytes) -> bytes:
    """A datastore's bytes with another header, of a right checksum."""
    front = FRONT.pack(MAGIC, 1, len(text), zlib.crc32(text))
    return (front + text)[:SIZE].ljust(SIZE, b"\0") + raw[SIZE:]


SHARDS: list[Any] = [
    [[7, HUGE, 1]],
    [[HUGE, 7, 1]],
    [[11, 7, "x"]],
    [[11, 7]],
    [[-4, 3, 1]],
    [[11, 11, 1]] * 2,
]


# Most fit the file's size: no other check refuses them.
HEADERS: list[dict[str, Any]] = [
    {"width": 2, "shards": [[8, 6, 0]]},
    {"vocabulary": HUGE},
    {"vocabulary": 0},
    {"tokens": -1},
    {"tokens": 1 << 60},
    {"tokens": 1.5},
    {"documents": True},
    {"tokenizer": 5},
    {"shards": [[11, 7, 0], [0, 0, 0]]},
    {"shards": [[4, 9, 0]]},
    {"shards": [[11, 7, "x"]]},
    {"shards": []},
    {"shards": [[1, 1, 0]] * 1025},
]


@pytest.mark.parametrize("entries", HEADERS)
def test_a_header_that_describes_no_datastore(
    entries: dict[str, Any], datastore: bytes, tmp_path: Path
) -> None:
    header = header_of(datastore)
    assert header["shards"][0][:2] == [11, 7] and header["width"] == 1
    (tmp_path / "odd").write_bytes(with_header(datastore, in_file(header | entries)))
    with pytest.raises(OutpaceError, match="its header describes no datastore"):
        Datastore(tmp_path / "odd")


def look_up(file: Path) -> None:
    with patch("outpace_lab.datastores.datastore._WHOLE", 0):  # as of a file too large to be read whole
        found = Datastore(file).look_up([1, 2, 3, 1])
    assert found.continuations.max(initial=-1) < 97


@sweep(max_examples=50)
@given(data=st.data())
def test_a_sweep_of_datastores(data: st.DataObject, datastore: bytes, tmp_path: Path) -> None:
    header = header_of(datastore)
    what = data.draw(st.sampled_from(["header", "shards", "broken", "byte"]))
    if what == "byte":
        place = data.draw(st.integers(SIZE, len(datastore) - 1))
        raw = datastore[:place] + bytes([data.draw(st.integers(0, 255))]) + datastore[place + 1 :]
    else:
        texts = {
            "header": odd(header),
            "shards": st.sampled_from([header | {"shards": one} for one in SHARDS]),
            "broken": st.sampled_from([one[: SIZE - FRONT.size] for one in BROKEN]),
        }
        raw = with_header(datastore, in_file(data.draw(texts[what])))
    (tmp_path / "odd").write_bytes(raw)
    survives(lambda: look_up(tmp_path / "odd"))


def write_datastore(folder: Path) -> Any:
    with DatastoreWriter(folder / "store", 300) as writer:
        writer.add(TEXT)
        writer.add(TEXT[::-1])
    return read_datastore(folder)


def read_datastore(folder: Path) -> Any:
    store = Datastore(folder / "store")
    return store.header, [store.look_up(TEXT[:end]).continuations.tolist() for end in range(1, 9)]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datastores as a kind of the files that outpace writes."""
    monkeypatch.setitem(test_written.KINDS, "datastore", Kind(write_datastore, read_datastore))


def test_damage_is_refused_or_changes_nothing(
    stored: None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    test_written.test_damage_is_refused_or_changes_nothing("datastore", folder, caplog)


@pytest.mark.parametrize("room", [0, 60])
def test_a_full_disk_leaves_what_was_there(stored: None, room: int, folder: Path) -> None:
    test_written.test_a_full_disk_leaves_what_was_there("datastore", room, folder)


@pytest.mark.parametrize("kind", test_plain_files.PLACES)
def test_what_is_not_a_file_is_refused_and_never_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(test_plain_files.READERS, "a datastore", ("a", Datastore))
    test_plain_files.test_what_is_not_a_file_is_refused_and_never_waited_for(kind, "a datastore", tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_a_corpus_of_what_is_not_a_file(kind: str, tmp_path: Path) -> None:
    make, reason = test_plain_files.PLACES[kind]
    make(tmp_path / "a.txt")
    with pytest.raises(OutpaceError, match=reason):
        unless_it_waits(lambda: corpus.find([tmp_path / "a.txt"]))
