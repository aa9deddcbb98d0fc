"""Work on clients' texts in processes: it ends at its share, others wait for nothing, and it is counted."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calling import with_template
from outpace.serve import texts
from outpace.serve.errors import Refused
from outpace.serve.pool import JobLimit, WorkerPool, spare
from outpace.serve.schemas import is_plain
from outpace.serve.texts import Texts
from outpace.serve.totals import CLIENT, Turns
from serving import STORY, Client, model, run, serving

EVIL = {"allOf": [{"type": "string", "pattern": f"a.*{number}.*"} for number in range(200)]}
PATTERN = {"type": "string", "pattern": "^[a-c]{3}$"}
POWER = "{{ n if 7 ** n else 0 }}"  # one line, which takes minutes


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def alive(pid: int) -> bool:
    """True for a process that runs: one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_busy(pid: int) -> None:
    """Wait until a process has computed for a while."""
    began = ticks(pid)
    while ticks(pid) < began + 20:
        time.sleep(0.01)


def ticks(pid: int) -> int:
    """The processor time of a process, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def with_seconds(pool: WorkerPool, seconds: float) -> None:
    pool.share = replace(pool.share, seconds=seconds)


async def until_working(pool: WorkerPool, count: int) -> None:
    """Wait until this number of workers are at work on a job."""
    while len(pool.pids) - len(pool._idle) < count or pool._starting:
        await asyncio.sleep(0.01)


def test_a_schema_past_its_share_is_refused_and_its_worker_ends() -> None:
    async def main() -> None:
        async with serving() as client:
            pool = client.service.grammars.pool
            with_seconds(pool, 0.3)
            exchange = client.chat(response_format=form(EVIL))
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and "takes more than 0.3 s" in error["message"]
            assert pool.pids == set() and client.service.admission.inside == 0
            with_seconds(pool, 60)
            found = await client.chat(response_format=form(PATTERN), max_tokens=9).json()
            assert len(found["choices"][0]["message"]["content"].strip('"')) == 3
            (pid,) = pool.pids  # it stays for the next
            await client.chat(response_format=form(PATTERN), max_tokens=9).json()
            assert pool.pids == {pid}
            with_seconds(pool, 0.3)
            os.kill(pid, signal.SIGSTOP)  # as a job that waits for ever
            exchange = client.chat(response_format=form(PATTERN))
            assert "takes more than 0.3 s" in (await exchange.json())["error"]["message"]
            assert not alive(pid)

    run(main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_worker_that_died_between_two_jobs_is_replaced(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """No text is blamed for a process that was killed, between two jobs or at work on it."""

    async def main() -> None:
        async with serving() as client:
            pool = client.service.grammars.pool
            with_seconds(pool, 60)
            for _ in range(2):  # the second time, of the process that replaced the first
                assert "choices" in await client.chat(response_format=form(PATTERN), max_tokens=9).json()
                (pid,) = pool.pids
                os.kill(pid, signal.SIGKILL)
                while alive(pid):
                    await asyncio.sleep(0.01)
            exchange = client.chat(response_format=form(PATTERN), max_tokens=9)
            assert "choices" in await exchange.json() and len(pool.pids) == 1 and pid not in pool.pids
            assert caplog.text.count("a process for compiling the schema has ended between two jobs") == 2

            exchange = client.chat(response_format=form(EVIL))
            await until_working(pool, 1)
            (pid,) = pool.pids
            await asyncio.to_thread(until_busy, pid)
            os.kill(pid, signal.SIGKILL)
            assert "was interrupted; try again" in (await exchange.json())["error"]["message"]
            assert exchange.status == 503 and exchange.headers["retry-after"] and pool.pids == set()
            assert "choices" in await client.chat(response_format=form(PATTERN), max_tokens=9).json()
            assert client.service.admission.inside == 0

    if loop == "asyncio":
        run(main)
    else:
        pytest.importorskip("uvloop").run(asyncio.wait_for(main(), 120))


def test_workers_give_way_to_the_engine() -> None:
    async def main() -> None:
        async with serving() as client:
            await client.chat(response_format=form(PATTERN), max_tokens=1).json()
            (pid,) = client.service.grammars.pool.pids
            assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0) + 10
            pools = [client.service.texts.pool, client.service.images.pool, client.service.grammars.pool]
            (turns,) = {pool._turns for pool in pools}
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            assert turns.total.most == max(1, min(8, cores - 1)) == spare(cores)
            assert spare(1) == spare(2) == 1 and spare(100) == spare()  # of a process with cores of its own

    run(main)


def test_schemas_without_end_keep_nobody_else_waiting_and_are_counted() -> None:
    async def main() -> None:
        async with serving() as client:
            pool = client.service.grammars.pool
            with_seconds(pool, 1000)
            turns = pool._turns.total
            evil = [client.chat(response_format=form(EVIL)) for _ in range(spare() + 1)]
            await until_working(pool, spare())
            assert turns.held == {client.address: spare()}  # one more waits
            for pid in pool.pids:
                os.kill(pid, signal.SIGSTOP)  # without end, however fast the machine
            for other in (client.at("b"), client.at("c")):
                assert "choices" in await other.chat(response_format=form(PATTERN), max_tokens=9).json()
            plain = form({"type": "boolean"})
            assert "choices" in await client.chat(response_format=plain, max_tokens=9).json()
            assert "choices" in await client.chat(max_tokens=2).json()
            assert (await client.get("/health"))["status"] == "ok"
            assert not any(one.task.done() for one in evil)
            for one in evil:
                one.leave()
                await one.task
            assert client.service.admission.inside == len(evil)  # the work goes on
            pids = pool.pids
            while client.service.admission.inside:
                await pool.close()
                await asyncio.sleep(0)
            await client.empty()
        assert not any(map(alive, pids))

    run(main)


def test_a_template_past_its_share_is_refused() -> None:
    async def main() -> None:
        async with serving(loaded=with_template(POWER), read=0.3) as client:
            exchange = client.chat(chat_template_kwargs={"n": 99_999_999})
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and "takes more than 0.3 s" in error["message"]
            assert client.service.texts.pool.pids == set()
            with_seconds(client.service.texts.pool, 60)
            asked = {"max_tokens": 1, "return_token_ids": True}
            found = await client.chat(chat_template_kwargs={"n": 7}, **asked).json()
            assert model().tokenizer.decode(found["prompt_token_ids"]) == "7"

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_job_past_its_memory_is_refused() -> None:
    async def main() -> None:
        reader = Texts(with_template("{{ 'a' * n }}"), JobLimit(seconds=100, memory=2**26), Turns(1))
        with pytest.raises(Refused, match="takes more than 64 MiB of memory"):
            await reader.tokens("ab " * 2**20, False, None)
        with pytest.raises(Refused, match="takes more than 64 MiB of memory"):
            await reader.conversation(STORY, {"n": 2**28}, None)
        assert await reader.conversation(STORY, {"n": 3}, None) == model().plain_tokens("aaa")
        assert await reader.conversation(STORY, {"n": 2**20}, 2**10) == 2**20  # too long to be tokenised
        await reader.close()

    run(main)


def test_workers_read_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["", "a", "é😀\x00", "<|endoftext|> </s>", " \n\t" * 40, "The quick brown fox. " * 50]
    talk = [*STORY, {"role": "assistant", "content": "é\n"}, {"role": "user", "content": "{{ 1 }}"}]

    async def main() -> None:
        reader = Texts(model(), JobLimit(100, 2**30), Turns(1))
        near = [await reader.tokens(text, special, None) for text in said for special in (True, False)]
        options: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}]
        near += [await reader.conversation(talk, one, None) for one in options]
        assert not reader.pool.pids  # short texts are read here
        monkeypatch.setattr(texts, "_SHORT", -1)
        far = [await reader.tokens(text, special, None) for text in said for special in (True, False)]
        far += [await reader.conversation(talk, one, None) for one in options]
        assert far == near and len(reader.pool.pids) == 1
        with pytest.raises(Refused, match="unpaired surrogate"):
            await reader.tokens("\ud800", False, None)
        with pytest.raises(Refused, match="template"):
            await reader.conversation([{"role": 5}], {}, None)
        await reader.close()

    run(main)


def test_a_tokenizer_that_cannot_be_sent_reads_in_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "_SHORT", -1)
    tokenizer = copy.deepcopy(model().tokenizer)
    tokenizer.kept = lambda: None  # which pickle refuses
    served = replace(model(), tokenizer=tokenizer)

    async def main() -> None:
        reader = Texts(served, JobLimit(100, 2**30), Turns(1))
        for _ in range(2):
            assert await reader.tokens("The dog", True, None) == model().tokens("The dog")
            assert await reader.conversation(STORY, {}, None) == model().encode_chat(STORY)
        assert not reader.pool.pids

    run(main)
    (record,) = [one for one in caplog.records if one.name == "outpace.serve"]
    assert "read in threads" in record.message


def test_whatever_reading_raises_is_a_400(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise TypeError("not so")

    async def main() -> None:
        async with serving() as client:
            monkeypatch.setattr(texts, "read_text", broken)
            for exchange in (client.chat(), client.complete("a"), client.send("/tokenize", {"prompt": "a"})):
                assert "TypeError: not so" in (await exchange.json())["error"]["message"]
                assert exchange.status == 400
            assert client.service.admission.inside == 0

    run(main)
    assert any(record.exc_info for record in caplog.records if record.name == "outpace.serve")


def test_reading_alone_has_room_too() -> None:
    async def full(client: Client, path: str, body: dict[str, Any]) -> None:
        exchange = client.send(path, body)
        assert "error" in await exchange.json() and exchange.status == 429

    async def main() -> None:
        async with serving(running=1, waiting=0) as client:
            holds = contextvars.copy_context()
            holds.run(CLIENT.set, client.address)
            ticket = holds.run(client.service.admit, 1)
            await full(client, "/tokenize", {"prompt": "a"})
            await full(client, "/detokenize", {"tokens": [5]})
            await full(client, "/v1/messages/count_tokens", {"messages": STORY})
            ticket.close()
            assert "tokens" in await client.send("/tokenize", {"prompt": "a"}).json()
            assert client.service.admission.inside == 0

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about processes")
def test_a_worker_ends_though_its_parent_was_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from outpace.loading import load\n"
        "from outpace.serve.pool import JobLimit\n"
        "from outpace.serve.texts import Texts\n"
        "from outpace.serve.totals import CLIENT, Turns\n"
        "async def main():\n"
        "    model = load()\n"
        "    model.tokenizer.chat_template = POWER\n"
        "    texts = Texts(model, JobLimit(1, 2**28), Turns(1))\n"
        "    pool = texts.pool\n"
        "    asked = asyncio.ensure_future(texts.conversation([{}], {'n': 99_999_999}, None))\n"
        "    while not pool.pids or pool._starting: await asyncio.sleep(0.01)\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(*pool.pids, flush=True)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"POWER = {POWER!r}\n{code}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr
    while alive(int(found.stdout)):  # the kernel ends it at its limit of processor time
        time.sleep(0.05)


def test_plain_schemas() -> None:
    assert is_plain({"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": False})
    for schema in (EVIL, PATTERN, {"properties": {"a": {"items": PATTERN}}}, {"$ref": "#"}, {"maxLength": 9},
                   {"anyOf": [{"type": "string"}] * 300}, {"maximum": 1e300}, {"properties": 5}):  # fmt: skip
        assert not is_plain(schema), schema
