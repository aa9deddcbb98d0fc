"""Workers in other environments: those of a stand-in, whose vLLM and llama.cpp are a few lines each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from outpace.bench import peers
from outpace.bench.peers import Failed, Worker, python_of, worker_of
from outpace.bench.runs import Request
from outpace.core import OutpaceError

LOAD = {"model": "m", "dtype": "float32", "device": "cpu", "length": 64, "threads": 1, "eos": [0]}

# The next token is one more than the last.
VLLM = """
import json, os, sys
__version__ = "1.2.3"
print("a library talks")
class SamplingParams:
    def __init__(self, **options): self.options = options
class Metric:
    def __init__(self, name, **values): self.name = name; self.__dict__.update(values)
class LLM:
    def __init__(self, **options):
        self.options, self.accepted = options, 0
        config = options.get("speculative_config") or {}
        if config.get("method") == "suffix":
            raise ImportError("arctic-inference is not installed\\nmore")
        assert options["enable_prefix_caching"] is False and options["max_model_len"] == 64
        assert os.environ["OMP_NUM_THREADS"] == "1"
    def generate(self, prompts, params, use_tqdm):
        asked = params.options
        assert asked["ignore_eos"] in (True, False) and asked["temperature"] == 0.0
        if prompts[0]["prompt_token_ids"] == [666]:
            sys.exit("the engine died")
        if prompts[0]["prompt_token_ids"] == [13]:
            raise RuntimeError("no luck")
        found = []
        for prompt in prompts:
            last = prompt["prompt_token_ids"][-1]
            tokens = [last + 1 + i for i in range(asked["max_tokens"])]
            self.accepted += len(tokens) // 2
            found.append(Metric("", outputs=[Metric("", token_ids=tokens)]))
        print("and talks")
        return found
    def get_metrics(self):
        return [
            Metric("vllm:spec_decode_num_draft_tokens", value=10 * self.accepted),
            Metric("vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.accepted, 0]),
        ]
"""

LLAMA = """
__version__ = "0.3"
class Llama:
    def __init__(self, **options):
        self.draft = options["draft_model"]
        assert options["logits_all"] == (self.draft is not None)
    def reset(self): pass
    def generate(self, prompt, **options):
        assert options["temp"] == 0.0 and options["repeat_penalty"] == 1.0
        token = prompt[-1] + 1
        yield token
        while True:
            if self.draft: self.draft([token])
            for _ in range(2 if self.draft else 1):
                token += 1
                yield token
"""
SPECULATIVE = """
class LlamaPromptLookupDecoding:
    def __init__(self, num_pred_tokens): self.size = num_pred_tokens
    def __call__(self, ids): return [1] * self.size
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a virtual environment, whose Python finds the stand-ins."""
    folder = tmp_path_factory.mktemp("venv")
    packages = folder / "packages"
    (packages / "llama_cpp").mkdir(parents=True)
    (packages / "vllm.py").write_text(VLLM, "utf-8")
    (packages / "llama_cpp" / "__init__.py").write_text(LLAMA, "utf-8")
    (packages / "llama_cpp" / "llama_speculative.py").write_text(SPECULATIVE, "utf-8")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    return folder


def request(*prompts: list[int], **more: Any) -> Request:
    given: dict[str, Any] = {"max_new_tokens": 6, "ends": False, "temperature": 0.0, **more}
    return Request(prompts, [[]] * len(prompts), seeds=[0] * len(prompts), **given)


def started(library: str, kind: str, environment: Path) -> Worker:
    worker = worker_of(library, kind, environment, LOAD, promised=True)
    assert isinstance(worker, Worker)
    return worker


def test_vllm_plain(environment: Path) -> None:
    worker = started("vllm", "plain", environment)
    try:
        assert worker.version == "1.2.3" and worker.name == "vllm:plain"
        found = worker.run(request([5], [7, 8]))
        assert found.outputs == [[6, 7, 8, 9, 10, 11], [9, 10, 11, 12, 13, 14]]
        assert (found.steps, found.drafted, found.accepted) == (12, 0, 0)
        assert found.first_tokens == 2 and 0 < found.first_seconds <= found.seconds
        with pytest.raises(OutpaceError, match="vllm:plain: RuntimeError: no luck"):
            worker.run(request([13]))
        assert worker.run(request([1])).outputs == [[2, 3, 4, 5, 6, 7]]
    finally:
        worker.close()
    assert worker._process.returncode == 0


def test_vllm_with_drafts_counts_those_of_the_run_alone(environment: Path) -> None:
    worker = started("vllm", "ngram", environment)
    try:
        for _ in range(2):
            found = worker.run(request([5]))
            assert (found.steps, found.drafted, found.accepted) == (3, 30, 3)
            assert found.accepted_at == [3, 0]
    finally:
        worker.close()


def test_a_worker_that_dies_says_its_last_words(environment: Path) -> None:
    worker = started("vllm", "plain", environment)
    try:
        with pytest.raises(OutpaceError, match="vllm:plain ended: the engine died"):
            worker.run(request([666]))
        with pytest.raises(OutpaceError, match="vllm:plain ended"):
            worker.run(request([1]))
    finally:
        worker.close()


def test_a_method_that_does_not_start_fails_its_row(environment: Path) -> None:
    method = worker_of("vllm", "suffix", environment, LOAD, promised=True)
    assert isinstance(method, Failed)
    with pytest.raises(OutpaceError, match=r"vllm:suffix: ImportError: arctic-inference is not installed$"):
        method.run(request([1]))
    method.close()


@pytest.mark.parametrize(("kind", "steps", "drafted"), [("plain", 6, 0), ("prompt_lookup", 4, 30)])
def test_llama_cpp(environment: Path, kind: str, steps: int, drafted: int) -> None:
    worker = started("llama.cpp", kind, environment)
    try:
        for _ in range(2):
            found = worker.run(request([5]))
            assert found.outputs == [[6, 7, 8, 9, 10, 11]]
            assert (found.steps, found.drafted, found.accepted) == (steps, drafted, 6 - steps)
        assert worker.run(request([-3], ends=True)).outputs == [[-2, -1, 0]]
        with pytest.raises(OutpaceError, match="one prompt at a time"):
            worker.run(request([1], [2]))
    finally:
        worker.close()


def test_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(OutpaceError, match=r"vllm is not installed here.*--peers vllm=/path/to/venv"):
        python_of("vllm", None)
    with pytest.raises(OutpaceError, match="llama-cpp-python"):
        python_of("llama.cpp", None)
    with pytest.raises(OutpaceError, match=r"is no environment: there is no .*python"):
        python_of("vllm", tmp_path)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n', "utf-8")
    python.chmod(0o755)
    with pytest.raises(OutpaceError, match=r"vllm is not installed in .*-m pip install vllm"):
        python_of("vllm", tmp_path)
    python.write_text("no program", "utf-8")
    with pytest.raises(OutpaceError, match="does not run"):
        python_of("vllm", tmp_path)
