"""A plugin of pytest: vLLM's and llama-server's HTTP tests against a server of outpace that runs already.

Its address and its model's folder come from the environment. Of vLLM's package there is what HTTP tests
need; a test that touches anything else of it is skipped.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

URL = os.environ["CONFORMANCE_URL"]
MODEL = os.environ["CONFORMANCE_MODEL"]
OUTPACE = json.loads(os.environ["CONFORMANCE_COMMAND"])  # of a server; options are added
INTERNAL = "tests vLLM's own classes, not a server"
# Options of vLLM's server that change nothing that its tests look at here, or mean the same without it.
KNOWN = {
    "--dtype", "--max-model-len", "--enforce-eager", "--max-num-seqs", "--gpu-memory-utilization", "--seed",
    "--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--shutdown-timeout", "--port",
    "--enable-server-load-tracking", "--chat-template", "--enable-lora", "--lora-modules", "--max-lora-rank",
    "--max-cpu-loras", "--enable-tokenizer-info-endpoint", "--enable-per-request-metrics", "--max-logprobs",
    "--enable-auto-tool-choice", "--tool-call-parser", "--structured-outputs-config.backend",
    "--reasoning-parser",
}  # fmt: skip


def get_tokenizer(*given: Any, **more: Any) -> Any:
    """The tokenizer of the model that is served, whatever the test calls it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def entry() -> None:
    """Stands in for vLLM's own module that starts a server: name and port are kept."""
    given = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    os.execvp(OUTPACE[0], [*OUTPACE, "--port", given["--port"], "--served-model-name", given["--model"]])


def get_open_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ModelConfig:
    """The attributes of a model's configuration that tests read."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self._config = json.loads((Path(MODEL) / "config.json").read_text("utf-8"))
        self.max_model_len = self._config["max_position_embeddings"]

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


class RemoteOpenAIServer:
    """The server that runs already; one of its own for tests that end it."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **more: Any) -> None:
        unknown = [one for one in vllm_serve_args if one.startswith("--") and one not in KNOWN]
        if unknown or more.get("override_hf_configs"):
            pytest.skip(f"needs an option of vLLM's server: {' '.join(unknown) or 'hf-overrides'}")
        self.url_root = URL
        self.proc: subprocess.Popen[bytes] | None = None
        if "--shutdown-timeout" in vllm_serve_args:
            drain = vllm_serve_args[list(vllm_serve_args).index("--shutdown-timeout") + 1]
            port = get_open_port()
            self.url_root = f"http://127.0.0.1:{port}"
            options = ["--port", str(port), "--drain", drain, "--served-model-name", model]
            self.proc = subprocess.Popen([*OUTPACE, *options])
            self._wait()

    def _wait(self) -> None:
        assert self.proc is not None
        while self.proc.poll() is None:
            try:
                urllib.request.urlopen(self.url_for("health/ready"), timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError("the server has ended before it was ready")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.proc is not None and self.proc.poll() is None:
            self.proc.kill()
            self.proc.wait()

    def _get_process_termination_timeout(self) -> float:
        return 15.0

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **more: Any) -> Any:
        import openai

        given = {
            "base_url": self.url_for("v1"),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
        }
        return openai.OpenAI(**given | more)

    def get_async_client(self, **more: Any) -> Any:
        import openai

        given = {
            "base_url": self.url_for("v1"),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
        }
        return openai.AsyncOpenAI(**given | more)

    def get_async_client_anthropic(self, **more: Any) -> Any:
        import anthropic

        given = {"base_url": self.url_root, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}
        return anthropic.AsyncAnthropic(**given | more)


class _Absent(type):
    """Something of vLLM's that is not here: a test that uses it is skipped."""

    def __call__(cls, *given: Any, **more: Any) -> Any:
        pytest.skip(INTERNAL, allow_module_level=True)

    def __getattr__(cls, name: str) -> Any:
        if not name.startswith("_"):
            pytest.skip(INTERNAL, allow_module_level=True)
        raise AttributeError(name)

    def __truediv__(cls, other: object) -> Any:
        pytest.skip(INTERNAL, allow_module_level=True)

    __add__ = __or__ = __ror__ = __truediv__


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: False


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {}) if name.endswith("Error") else _Absent(name, (), {})


PRESENT: dict[str, dict[str, Any]] = {
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.version": {"__version__": os.environ["CONFORMANCE_VERSION"]},
    "vllm.utils.network_utils": {"get_open_port": get_open_port},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.transformers_utils.repo_utils": {
        "hf_api": lambda: SimpleNamespace(snapshot_download=lambda **_: "")
    },
    "vllm": {"envs": SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)},
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": []},
    "torch": {},
    "wget": {},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules above, and any of vLLM's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name in PRESENT or name.split(".")[0] == "vllm"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(PRESENT.get(module.__name__, {}))


sys.meta_path.insert(0, Finder())


@pytest.fixture(autouse=True)
def metrics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's metrics, whose prefix is the server's name."""
    if count := getattr(request.module, "_num_running_requests", None):
        monkeypatch.setattr(
            request.module, "_num_running_requests", lambda text: count(text.replace("outpace:", "vllm:"))
        )


@pytest.fixture(autouse=True)
def llama_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-server's paths without /v1, and the sentences of its test model, which is not served here."""
    utils = sys.modules.get("utils")
    if utils is None or not hasattr(utils, "ServerProcess"):
        return
    make_url = utils.ServerProcess.make_url

    def with_v1(server: Any, path: str, host: str | None = None) -> Any:
        short = path.split("?")[0].rstrip("/")
        return make_url(server, f"/v1{path}" if short == "/chat/completions" else path, host)

    monkeypatch.setattr(utils.ServerProcess, "make_url", with_v1)
    if hasattr(request.module, "match_regex"):
        monkeypatch.setattr(request.module, "match_regex", lambda regex, text: isinstance(text, str))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the model served here makes pointless."""
    for item in items:
        if item.name.startswith("test_context_size_exceeded"):
            item.add_marker(pytest.mark.skip("needs a context of 512 tokens"))
        if item.name.startswith("test_response_format_json"):  # without a limit, on 8,192 tokens
            item.add_marker(pytest.mark.skip("checks its model's texts or token counts"))
