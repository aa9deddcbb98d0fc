"""A prefix cache that survives a restart, only where a folder is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outpace.engine.engine import Engine
from outpace.engine.prefix import PrefixCache
from outpace.engine.prefix_file import NAME
from serving import STORY, run, serving

LONG = [*STORY, {"role": "assistant", "content": "No. " * 40}, *STORY]


def cached(engine: Engine) -> None:
    engine._batch.memory.prefixes = PrefixCache(2**24)


def test_a_prompt_is_found_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        found = []
        for store in (tmp_path / "store", tmp_path / "store", None):
            async with serving(change=cached, store=store) as client:
                answer = await client.chat(messages=LONG, max_tokens=4).json()
                details = answer["usage"]["prompt_tokens_details"]
                found.append((answer["choices"], details["cached_tokens"] > 0))
            assert [one.name for one in tmp_path.iterdir()] == ["store"]
        assert [shared for _, shared in found] == [False, True, False]
        assert found[0][0] == found[1][0] == found[2][0]
        (tmp_path / "store" / NAME).write_bytes(b"no blocks")
        with caplog.at_level(logging.WARNING):
            async with serving(change=cached, store=tmp_path / "store") as client:
                assert (await client.chat(messages=LONG, max_tokens=4).json())["choices"] == found[0][0]
        assert "prompts that were stored are not used: cannot read" in caplog.text

    run(main)
