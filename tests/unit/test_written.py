"""Files that outpace writes and reads again: what comes back is what was written, or a refusal by name.

A new kind of file belongs into ``KINDS``.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.cli.writer import ResultWriter, write_json
from outpace.core import OutpaceError
from outpace.engine.prefix import BLOCK
from outpace.engine.profile import Profile, load_profile, save_profile
from outpace.learned.folder import read_config, read_weights, write_folder
from outpace.native.packaged import sealed, whole
from outpace.targets.step import record
from zoo.family import randomise

TEXT = [7 * number % 60 + 1 for number in range(2 * BLOCK + 5)]
PARAMS = SamplingParams(max_new_tokens=4)
SEEDS = range(24)


class Kind(NamedTuple):
    """A kind of file: a writer into a folder, and a reader of the value that the writer returned.

    Attributes:
        read: raises OutpaceError, or returns None where the file is left out.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def engine() -> Engine:
    model = tiny_llama().double()
    randomise(model, 0)
    return Engine(Target(model, check=False), "none", prefix_cache=2**20, adaptive=False)


def entries(of: Engine) -> Any:
    found = of._batch.memory.stored().entries()
    return [(*entry[:3], [row.tolist() for row in entry.rows]) for entry in found]


def write_prefixes(folder: Path) -> Any:
    one = engine()
    one.generate([TEXT], PARAMS)
    one.save_prefixes(folder)
    return entries(one)


def read_prefixes(folder: Path) -> Any:
    one = engine()
    one.load_prefixes(folder)
    return entries(one)


KEY = {"question": "steps"}
ANSWER = "a sum of rows differs in the last bit"


def recorded() -> record.Record:
    return record.Record(lambda: {"model": "one", "machine": "this"})


def write_record(folder: Path) -> Any:
    recorded().keep(ANSWER, **KEY)
    return ANSWER


PROFILE = Profile("suffix:memory=0", "latency", 1, 12.5, 1.75, 2.5, 8, "chat", "1", {"a": {"b": [0.25, 1.5]}})


def write_profile(folder: Path) -> Any:
    save_profile(folder / "profile.toml", engine().target, PROFILE)
    return PROFILE


TENSORS = {"head.weight": torch.arange(64.0).reshape(8, 8), "head.bias": torch.ones(8)}
CONFIG = {"method": "medusa", "format": 2, "target": {"layers": 2}, "config": {"heads": 4, "scale": 0.5}}


def write_drafter(folder: Path) -> Any:
    write_folder(folder, CONFIG, TENSORS)
    return read_drafter(folder)


def read_drafter(folder: Path) -> Any:
    config = read_config(folder, "medusa")
    return config, {name: tensor.tolist() for name, tensor in read_weights(folder).items()}


def write_library(folder: Path) -> Any:
    (folder / sealed("library", data := bytes(range(200)), ".so")).write_bytes(data)
    return data


def read_library(folder: Path) -> Any:
    [path] = folder.iterdir()
    return data if whole(path.name, data := path.read_bytes()) else None


KINDS = {
    "prefixes": Kind(write_prefixes, read_prefixes),
    "record": Kind(write_record, lambda folder: recorded().find(**KEY)),
    "profile": Kind(write_profile, lambda folder: load_profile(folder / "profile.toml", engine().target)),
    "drafter": Kind(write_drafter, read_drafter),
    "library": Kind(write_library, read_library),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "written"
    found.mkdir(mode=0o700)
    monkeypatch.setenv(record.TESTED, str(found))
    record._warn.cache_clear()
    return found


def damage(path: Path, rng: random.Random) -> None:
    """Flip some bits, cut the end off, or fill a part with zeros: anywhere, or behind any header."""
    data = bytearray(path.read_bytes())
    form, begin = rng.randrange(6), rng.choice((0, max(0, len(data) - 512)))
    if form == 0:
        del data[rng.randrange(begin, len(data)) :]
    elif form == 1:
        start = rng.randrange(begin, len(data))
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    else:
        for _ in range(rng.choice((1, 1, 8, (len(data) - begin) // 4))):
            data[rng.randrange(begin, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_changes_nothing(
    kind: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, read = KINDS[kind]
    right = write(folder)
    assert read(folder) == right
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = {path: path.read_bytes() for path in files}
    refused = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        path = rng.choice(files)
        damage(path, rng)
        record._warn.cache_clear()
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                found = read(folder)
        except OutpaceError as error:
            refused += 1
            assert str(folder) in str(error) and "\n" not in str(error), error
        else:
            refused += found is None
            assert found is None or found == right, f"{path.name}, seed {seed}"
            if kind == "record" and found is None:
                assert path.name in caplog.text  # it is said which file was left out
        path.write_bytes(kept[path])
        assert read(folder) == right
    assert refused > len(SEEDS) // 3


def test_signs_in_a_quarter_of_the_stored_rows(folder: Path) -> None:
    """The rows that are computed again are the last text's first ones; all others are known by digests."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    write_prefixes(folder)
    (path,) = folder.iterdir()
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    names = sorted(name for name in tensors if name != "blocks")
    for name in names[::4]:
        changed = {**tensors, name: -tensors[name]}
        save_file(changed, path, about)
        with pytest.raises(OutpaceError, match=f"damaged: {name} is not what was written"):
            read_prefixes(folder)


# -- a full disk -------------------------------------------------------------------------------------------


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """A limit on the size of files, at which writing fails as on a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit of this kind")
@pytest.mark.parametrize("room", [0, 60])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"library"}))
def test_a_full_disk_leaves_what_was_there(kind: str, room: int, folder: Path) -> None:
    write, read = KINDS[kind]
    for _ in range(2):  # without a file, and with one
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with full_disk(room):
            if kind == "record":
                write(folder)  # a record is not needed
            else:
                with pytest.raises(OutpaceError, match="cannot write"):
                    write(folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        right = write(folder)
        assert read(folder) == right


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit of this kind")
def test_results_of_a_command_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("before")
    with full_disk(2), pytest.raises(OutpaceError, match=f"cannot write {path}: File too large"):
        write_json('{"a": 1}', str(path))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    writer = ResultWriter(path, overwrite=True)
    with full_disk(2), pytest.raises(OutpaceError, match=f"cannot write {path}: File too large"):
        writer.write("a longer text")
    writer.close()
    write_json('{"a": 1}', str(path))
    assert path.read_text() == '{"a": 1}\n'


def test_a_profile_that_a_user_has_changed(folder: Path) -> None:
    write_profile(folder)
    path = folder / "profile.toml"
    text = path.read_text().replace("suffix:memory=0", "lookahead")
    path.write_text(text)
    with pytest.raises(OutpaceError, match="delete its line with the digest"):
        load_profile(path, engine().target)
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("digest")))
    assert load_profile(path, engine().target).drafter == "lookahead"


def test_a_drafter_of_an_earlier_version_has_no_digest(folder: Path) -> None:
    right = write_drafter(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["digest"]
    path.write_text(json.dumps(config))
    with pytest.raises(OutpaceError, match="it has no digest"):
        read_drafter(folder)
    path.write_text(json.dumps({**config, "format": 1}))
    assert read_drafter(folder) == ({**right[0], "format": 1}, right[1])
