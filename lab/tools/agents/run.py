"""Run agents of others against ``outpace serve``: install them, and have a conversation with a call in it.

Usage: run.py [--agent NAME]... [--drafter NAME]... [--turns N] [--model NAME] [--keep FOLDER]

The agents come from the package registries into the user's cache; nothing else is fetched, and an agent
that cannot be installed is reported. The model is a tiny one of random weights and long context, whose
words do not matter, unless another is named. Ends with 1 if an agent failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from proxy import Proxy, Turn

CONTEXT = 262_144
SECONDS = 1800  # for one turn of an agent
NAME = "tiny"
TEMPLATE = (
    "{% if tools %}Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = ("Read hello.txt.", "And now?", "What does it say?", "Thank you. Anything else?")


@dataclass(frozen=True)
class Agent:
    """An agent of others.

    Attributes:
        package: its package, of npm or, after "pip:", of PyPI.
        program: its program.
        command: the arguments of a turn, from the address, the text, and whether the conversation goes on.
        env: environment, from the address.
        tool: the tool that it must call first, with its arguments; None if it has no tools.
        config: files that it reads, by their places in its home, from the address.
    """

    package: str
    program: str
    command: Callable[[str, str, bool], list[str]]
    env: Callable[[str], dict[str, str]]
    tool: tuple[str, Callable[[Path], dict[str, Any]]] | None
    config: Callable[[str], dict[str, str]] = lambda url: {}


def _codex(url: str, text: str, more: bool) -> list[str]:
    provider = f'{{name="outpace",base_url="{url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    given = ["-c", "model_provider=outpace", "-c", f"model_providers.outpace={provider}", "-m", NAME]
    head = ["exec", "resume", "--last"] if more else ["exec"]
    return [*head, "--skip-git-repo-check", *given, text]


def _opencode(url: str) -> dict[str, str]:
    model = {NAME: {"name": NAME, "limit": {"context": CONTEXT, "output": 8192}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    config = {"provider": {"outpace": {**provider, "name": "outpace", "models": model}}, "autoupdate": False}
    return {".config/opencode/opencode.json": json.dumps({**config, "small_model": f"outpace/{NAME}"})}


AGENTS = {
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "qwen",
        lambda url, text, more: [*(["--continue"] if more else []), "--auth-type", "openai", "-p", text],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": NAME},
        ("read_file", lambda folder: {"file_path": str(folder / "hello.txt")}),
    ),
    "opencode": Agent(
        "opencode-ai",
        "opencode",
        lambda url, text, more: ["run", *(["--continue"] if more else []), "-m", f"outpace/{NAME}", text],
        lambda url: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        ("read", lambda folder: {"filePath": str(folder / "hello.txt")}),
        _opencode,
    ),
    "codex": Agent(
        "@openai/codex",
        "codex",
        _codex,
        lambda url: {"OPENAI_API_KEY": "none"},
        ("get_goal", lambda folder: {}),
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "claude",
        lambda url, text, more: [*(["--continue"] if more else []), "--model", NAME, "-p", text],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": NAME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        ("Read", lambda folder: {"file_path": str(folder / "hello.txt")}),
    ),
    "aider": Agent(
        "pip:aider-chat",
        "aider",
        lambda url, text, more: [
            *("--model", f"openai/{NAME}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"),
            *(
                "--no-git",
                "--yes-always",
                "--no-check-update",
                "--no-show-model-warnings",
                "--analytics-disable",
            ),
            *("--no-show-release-notes", *(["--restore-chat-history"] if more else []), "--message", text),
        ],
        lambda url: {},
        None,
    ),
}


def cache() -> Path:
    """The folder of installed agents."""
    base = os.environ.get("OUTPACE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / ("agents" if os.environ.get("OUTPACE_CACHE") else "outpace/agents")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def installed(name: str, agent: Agent) -> Path:
    """The program of an agent, installed if it is not there yet.

    Raises:
        RuntimeError: it cannot be.
    """
    folder = cache() / name
    pip = agent.package.startswith("pip:")
    program = folder / ("bin" if pip else "node_modules/.bin") / agent.program
    if program.exists():
        return program
    if pip:
        venv.create(folder, with_pip=True)
        command = [str(folder / "bin/pip"), "install", "--quiet", agent.package.removeprefix("pip:")]
    elif shutil.which("npm"):
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), agent.package]
    else:
        raise RuntimeError("npm is not here; install Node.js 20 or later")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not program.exists():
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return program


def tiny() -> Path:
    """The folder of a model of random weights: the embedded model's tokenizer, and a template with tools."""
    folder = cache() / "model"
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import outpace

    tokenizer = outpace.load().tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def server(model: str) -> Iterator[int]:
    """A server of a model; its port."""
    command = [sys.executable, "-m", "outpace", "serve", "--model", model, "--port", "0"]
    command += ["--served-model-name", NAME, "--no-access-log", "--max-body", "16"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if (address := re.search(r"API +http://\S+:(\d+)/v1", said)) and "ready after" in said:
                yield int(address[1])
                return
        raise RuntimeError(f"the server has ended: {said}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def tried(
    agent: Agent, program: Path, port: int, drafter: str | None, turns: int, keep: Path | None
) -> tuple[list[Turn], str]:
    """The requests of an agent in a conversation, and what it said if it failed."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "work")
        folder.mkdir()
        (folder / "hello.txt").write_text("Hello from a file.\n", "utf-8")
        tool = None if agent.tool is None else (agent.tool[0], agent.tool[1](folder))
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        proxy = Proxy(port, tool, drafter=drafter, keep=keep)
        with proxy as own:
            url = f"http://127.0.0.1:{own}"
            for place, text in agent.config(url).items():
                Path(home, place).parent.mkdir(parents=True, exist_ok=True)
                Path(home, place).write_text(text, "utf-8")
            kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TMPDIR")}
            env = {**kept, "HOME": home, "CI": "1", **agent.env(url)}
            for number in range(turns):
                command = [str(program), *agent.command(url, ASKED[number % len(ASKED)], number > 0)]
                done = subprocess.run(
                    command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS,
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
                said = f"{done.stdout[-300:]} {done.stderr[-600:]}".strip()
                if done.returncode:
                    return proxy.turns, f"turn {number + 1} ended with {done.returncode}: {said}"
        return proxy.turns, ""


def failure(agent: Agent, turns: Sequence[Turn], said: str) -> str:
    """Why a conversation is no success; "" if it is one."""
    if wrong := next((one for one in turns if one.status != 200), None):
        return f"{wrong.path} got {wrong.status}: {wrong.error[:300]}"
    if said:
        return said
    if agent.tool is not None and not any(one.forced and one.called for one in turns):
        return "no call was made"
    return "" if len(turns) > 1 else "there was no second turn"


def main() -> int:
    """Run the agents and print the table; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", action="append", choices=list(AGENTS), help="an agent; all by default")
    parser.add_argument(
        "--drafter", action="append", help="a drafter of the requests; the server's by default"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of the user")
    parser.add_argument("--model", help="a model for the server; a tiny one by default")
    parser.add_argument("--keep", type=Path, help="a folder for the requests of the agents")
    given = parser.parse_args()
    print("| agent | drafter | turn | tools | alike | prompt | cached | first token | drafted | accepted | |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|", flush=True)
    failed = dict[str, str]()
    with server(given.model or str(tiny())) as port:
        for name in given.agent or list(AGENTS):
            agent = AGENTS[name]
            for drafter in given.drafter or [None]:
                try:
                    keep = None if given.keep is None else given.keep / name
                    turns, said = tried(agent, installed(name, agent), port, drafter, given.turns, keep)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed[name] = str(error)
                    continue
                most = max((one.tools for one in turns), default=0)  # an agent's side requests have fewer
                main_turns = [one for one in turns if one.tools == most]
                for number, one in enumerate(main_turns[:5], 1):
                    first = "" if one.first is None else f"{one.first:.2f} s"
                    note = f"calls {one.forced}" if one.forced else one.left_out and f"without {one.left_out}"
                    cells = [
                        name,
                        drafter or "the server's",
                        number,
                        one.tools,
                        f"{one.alike:.1%}",
                        one.prompt,
                        one.cached,
                        first,
                    ]
                    print("|", *_between([*cells, one.drafted, one.accepted, note]), flush=True)
                if wrong := failure(agent, turns, said):
                    failed[name] = wrong
    for name, why in failed.items():
        print(f"\n{name} failed: {why}")
    return 1 if failed else 0


def _between(cells: Sequence[object]) -> Iterator[str]:
    for cell in cells:
        yield str(cell)
        yield "|"


if __name__ == "__main__":
    sys.exit(main())
