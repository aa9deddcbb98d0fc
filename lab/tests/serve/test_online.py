"""A served drafter that learns from a stream of requests whose topic shifts, with a drafter per topic."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.drafters.heads.medusa import MedusaConfig
from outpace_lab.drafters.routed import TopicRouter
from outpace_lab.train import Learning, Topics
from outpace_lab.train.modules.heads import TrainedMedusa
from serving import Client, model, run, serving

STORIES = [f"Once upon a time there was a {animal}" for animal in ("dog", "cat", "fox", "hen")]
CODE = [f"def {name}(values):\n    return" for name in ("total", "least", "most", "mean")]
STREAM = [STORIES, CODE, STORIES]
ASKED = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "speculation_metrics": True}


@pytest.fixture
def heads(tmp_path: Path) -> str:
    """Untrained heads; the embedded model's draft model would learn a hundred times as slowly."""
    config = MedusaConfig(heads=2, own_head=True, max_nodes=4)
    TrainedMedusa.new(config, model().target).save(tmp_path / "heads")
    return f"medusa:path={tmp_path / 'heads'}"


async def answers(client: Client, prompts: list[str], **more: Any) -> list[list[int]]:
    sent = [client.complete(prompt, **ASKED, **more) for prompt in prompts]
    return [(await one.json())["choices"][0]["token_ids"] for one in sent]


@pytest.mark.slow
def test_each_topic_of_a_served_stream_has_a_drafter_that_learns_and_no_token_changes(heads: str) -> None:
    router = TopicRouter([[model().encode(prompt) for prompt in topic] for topic in (STORIES, CODE)])
    topics = Topics(
        model().target, heads, router, 2, Learning(updates=2, measured=20, length=32, held_back=2)
    )

    async def plain() -> list[list[list[int]]]:
        async with serving("none") as client:
            return [await answers(client, block) for block in STREAM]

    async def learning() -> list[list[list[int]]]:
        found = []
        async with serving(learner=topics, others={"copy": "prompt_lookup"}) as client:
            for block in STREAM:
                found.append(await answers(client, block))
                await client.empty()
                topics.step()
            # Requests without the drafter, with a trace or with a prediction get the same tokens.
            for name in ("off", "copy"):
                assert await answers(client, STORIES[:1], speculation=name) == found[0][:1]
            guess = {"prediction": {"type": "content", "content": "a dog"}}
            chats = [await client.chat(**ASKED, **more).json() for more in ({}, guess)]
            assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 1
            traced = {"prompt": STORIES[0], "temperature": 0, "stream": True, "trace": True, **ASKED}
            chunks = await client.send("/v1/completions", traced).events()
            steps = [step for chunk in chunks[:-1] for c in chunk["choices"] for step in c.get("trace", ())]
            assert [token for step in steps for token in step["tokens"]] == found[0][0]
        return found

    assert run(learning) == run(plain)
    # The first block has no code.
    assert [len(learner.rounds) for learner in topics.learners] == [3, 2]
    for learner, own in zip(topics.learners, (STORIES, CODE), strict=True):
        starts = {tuple(record.tokens[:4]) for _, record in learner._buffer._records}
        assert {tuple(model().encode(prompt)[:4]) for prompt in own} <= starts
        assert len(learner._buffer._records) >= len(own)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (None, "No such file"),
        ('{"prompt": "a", "references": ["b"]}', "leave references out"),
        ("", "contains no prompt"),
    ],
)
def test_topics_are_read_before_the_model(tmp_path: Path, line: str | None, told: str) -> None:
    file = tmp_path / "code.jsonl"
    if line is not None:
        file.write_text(line, "utf-8")
    (tmp_path / "no model").mkdir()
    (tmp_path / "no model" / "config.json").write_text("{}", "utf-8")
    missing = ["-m", str(tmp_path / "no model"), "-d", "draft_model"]
    result = CliRunner().invoke(app, ["serve", "--port", "0", *missing, "--observer", f"topics:files={file}"])
    assert result.exit_code == 2 and told in " ".join(result.stderr.split())


def test_a_topic_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text('"a"', "utf-8")
    twice = "+".join(2 * [str(tmp_path / "code.jsonl")])
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--observer", f"topics:files={twice}"])
    assert result.exit_code == 2 and "is given twice" in " ".join(result.stderr.split())


def test_topics_without_files_are_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--observer", "topics:every=9"])
    assert result.exit_code == 2 and "topics needs files" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_the_command_learns_and_saves_a_drafter_per_topic(heads: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--dtype", "float64", "-d", heads]
    command += ["--memory", "0.2", "--no-adaptive", "--no-access-log"]
    files = []
    for name, prompts in (("stories", STORIES), ("code", CODE)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
        files.append(str(file))
    how = f"files={'+'.join(files)},every=60,updates=1,measured=20,length=32,out={tmp_path / 'learnt'}"
    command += ["--observer", f"topics:{how}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if "ready after" in line:
                break
        address = re.search(r"API +(http://\S+)/v1", said)
        assert address is not None, said
        with httpx2.Client(base_url=address[1], timeout=60) as http:
            for block in 4 * STREAM:
                for prompt in block:
                    asked = {"prompt": prompt, "temperature": 0, **ASKED}
                    assert http.post("/v1/completions", json=asked).status_code == 200
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
        assert process.wait(60) == 0, said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    # Whether a round in the background has ended is a matter of time; the test above runs them itself.
    assert re.search(r"stories\.jsonl: online: (\d+ rounds|nothing was learnt)", said), said
    assert "code.jsonl: online: " in said
    for number in range(2):
        assert (tmp_path / "learnt" / str(number) / "model.safetensors").is_file()
        assert (tmp_path / "learnt" / str(number) / "online.json").is_file()
