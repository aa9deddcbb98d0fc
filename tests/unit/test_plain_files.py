"""Pipes, sockets, devices and folders in place of files: a reader of one might wait, or read, for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from limits import linux, unless_it_waits
from outpace.bench.items import read_values
from outpace.cli import prompts
from outpace.cli.encoder_decoder import read_wav
from outpace.core import OutpaceError, first_line
from outpace.engine.profile import read_profiles
from outpace.files import read_json
from outpace.learned.folder import read_weights
from outpace.learned.published import tensors_of
from outpace.names import check_model
from outpace.targets.llamacpp.library import check_file
from outpace.targets.weights.checkpoint import WEIGHTS, header

pytestmark = linux


def make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")  # which has few letters
    os.close(folder)


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe; give a file"),
    "socket": (make_socket, "is a socket; give a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device; give a file"),
    "folder": (Path.mkdir, "is a folder; give "),
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "JSON": ("a.json", read_json),
    "prompts": ("a.jsonl", lambda path: prompts.read(None, path)),
    "values": ("a.jsonl", read_values),
    "compressed values": ("a.jsonl.gz", read_values),
    "profiles": ("a.toml", read_profiles),
    "weights": (WEIGHTS, header),
    "a drafter's weights": (WEIGHTS, lambda path: read_weights(path.parent)),
    "a published drafter's weights": (WEIGHTS, lambda path: tensors_of([path], "eagle")),
    "a GGUF file": ("a.gguf", check_file),
    "a model's GGUF file": ("a.gguf", lambda path: check_model(str(path))),
    "sound": ("a.wav", lambda path: read_wav(path, 16_000)),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_a_file_is_refused_and_never_waited_for(kind: str, reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    make, reason = PLACES[kind]
    make(tmp_path / name)
    with pytest.raises(OutpaceError, match=reason):
        unless_it_waits(lambda: read(tmp_path / name))


def test_the_message_of_a_missing_entry() -> None:
    """``str`` of it is its name alone, as in "cannot load the model: 'metadata'"."""
    with pytest.raises(KeyError) as raised:
        {}["metadata"]
    assert first_line(raised.value) == "there is no entry 'metadata'"


def test_a_line_that_ends_in_a_colon_says_nothing_alone() -> None:
    assert first_line(ValueError("Wrong field 'a':\n\n  it is 5\nand more")) == "Wrong field 'a': it is 5"
    assert first_line(ValueError(" a :")) == "a" and first_line(ValueError("")) == "ValueError"
