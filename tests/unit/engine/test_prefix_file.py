"""The prefix cache in a file: another engine goes on from it, if its model gives the same rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError
from outpace.engine import prefix_file
from outpace.engine.prefix import BLOCK, Entry
from zoo.family import randomise

PARAMS = SamplingParams(max_new_tokens=8)
TEXT = [7 * number % 60 + 1 for number in range(3 * BLOCK + 5)]


def engine(seed: int = 0, dtype: torch.dtype = torch.float64, limit: int = 2**20, **options: Any) -> Engine:
    model = tiny_llama().to(dtype)
    randomise(model, seed)
    return Engine(Target(model, check=False), "prompt_lookup", prefix_cache=limit, adaptive=False, **options)


def written(folder: Path) -> tuple[list[int], Path]:
    """The tokens of an engine whose prefix cache was written to a folder, and the file."""
    one = engine()
    (found,) = one.generate([TEXT], PARAMS)
    one.save_prefixes(folder)
    return found.tokens, folder / prefix_file.NAME


def test_another_engine_goes_on(tmp_path: Path) -> None:
    tokens, path = written(tmp_path / "new")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    two = engine()
    two.load_prefixes(path.parent)
    (found,) = two.generate([TEXT], PARAMS)
    assert found.tokens == tokens and found.stats.cached_tokens == 3 * BLOCK
    (other,) = two.generate([[*TEXT[:BLOCK], *reversed(TEXT)]], PARAMS)
    assert other.stats.cached_tokens == BLOCK
    two.save_prefixes(tmp_path)
    three = engine()
    three.load_prefixes(tmp_path)
    assert three.generate([TEXT], PARAMS)[0].stats.cached_tokens == 3 * BLOCK
    sequence = three.add(TEXT, PARAMS, salt="another")
    while sequence.finish_reason is None:
        three.step()
    assert sequence.stats.cached_tokens == 0 and sequence.generation().tokens == tokens


def test_a_smaller_cache_has_what_was_used_last(tmp_path: Path) -> None:
    tokens, path = written(tmp_path)
    size = engine()._batch.cache.copied_bytes(BLOCK)
    two = engine(limit=2 * size)
    two.load_prefixes(path.parent)
    (found,) = two.generate([TEXT], PARAMS)
    assert found.tokens == tokens and found.stats.cached_tokens == 2 * BLOCK


def test_what_is_of_another_model_is_not_used(tmp_path: Path) -> None:
    tokens, path = written(tmp_path)
    for other, why in ((engine(1), "other rows"), (engine(0, torch.float32), "another type of weights")):
        with pytest.raises(OutpaceError, match=why):
            other.load_prefixes(tmp_path)
        assert other.generate([TEXT], PARAMS)[0].stats.cached_tokens == 0
    whole = path.read_bytes()
    for wrong in (whole[: len(whole) // 2], b"", b"no such file"):
        path.write_bytes(wrong)
        with pytest.raises(OutpaceError, match="cannot read"):
            engine().load_prefixes(tmp_path)
    path.unlink()
    two = engine()
    two.load_prefixes(tmp_path)  # there is nothing
    assert two.generate([TEXT], PARAMS)[0].tokens == tokens


def test_two_that_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a whole file, though the other does in the middle: what is read is that of one of them."""
    tokens, _ = written(tmp_path)
    one, two, save = engine(), engine(), prefix_file.save_file
    for each in (one, two):
        each.generate([TEXT, TEXT[::-1]], PARAMS)

    def found() -> tuple[list[int], int]:
        third = engine()
        third.load_prefixes(tmp_path)
        (answer,) = third.generate([TEXT], PARAMS)
        return answer.tokens, answer.stats.cached_tokens

    def beside(*given: Any) -> None:
        monkeypatch.setattr(prefix_file, "save_file", save)
        save(*given)
        two.save_prefixes(tmp_path)
        assert found() == (tokens, 3 * BLOCK)

    monkeypatch.setattr(prefix_file, "save_file", beside)
    one.save_prefixes(tmp_path)
    assert found() == (tokens, 3 * BLOCK)
    assert [path.name for path in tmp_path.iterdir()] == [prefix_file.NAME]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners")
def test_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for use in (engine().load_prefixes, engine().save_prefixes):
        with pytest.raises(OutpaceError, match="chmod 700"):
            use(tmp_path)


def test_what_cannot_be_stored() -> None:
    model = tiny_llama()
    with pytest.raises(OutpaceError, match="no prefix cache to store"):
        Engine(Target(model, check=False)).check_prefix_store()
    engine().check_prefix_store()


def test_keys_of_images_come_back(tmp_path: Path) -> None:
    keys = (5, (90, 4, 4, 5), ((90, 4, 4, 6), b"\0\xff"), (90, b"a"))
    images = [
        Entry(8, ("a salt",), keys, [torch.ones(2, 3)]),
        Entry(9, 8, keys, [torch.zeros(2, 3)]),
    ]
    one = engine()
    one.generate([TEXT], PARAMS)
    entries = [*one._batch.memory.stored().entries(), *images]
    prefix_file.write(tmp_path, entries, {})
    found = prefix_file.read(tmp_path, {}, one.target, one._batch.cache)
    assert [entry[:3] for entry in found] == [entry[:3] for entry in entries]
    assert [entry.rows[0].tolist() for entry in found] == [entry.rows[0].tolist() for entry in entries]
    prefix_file.write(tmp_path, images, {})
    with pytest.raises(OutpaceError, match="no text that rows of this model could be compared with"):
        prefix_file.read(tmp_path, {}, one.target, one._batch.cache)
