"""What to run first on a GPU: tests, tokens, figures of a 7B model, a profile, memory, families.

    python lab/measure/first_hour.py --out FOLDER --page docs/measurements/gpu.md
    python lab/measure/first_hour.py --out FOLDER --emulate

Each step runs in a process of its own, for at most 9 minutes, and all of them for at most 28; what a step
found is in FOLDER/STEP.json as soon as it has ended. Steps for which no time is left are named. ``--page``
writes a page from these files. ``--emulate`` runs the same on the tests' emulated accelerator, with tiny
models, which shows that the steps run, and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.core import OutpaceError
from outpace.embedded import nano_path
from outpace.files import replace_text
from outpace.targets.gpu import tree_attention

ROOT = Path(__file__).parents[2]
MINUTES, MOST = 28, 9
DRAFTERS = (
    "none",
    "prompt_lookup",
    "suffix:memory=0",
    "lookahead",
    "jacobi",
    "token_recycling",
    "draft_model",
    "eagle",
)
WAYS: dict[str, dict[str, Any]] = {
    "launched": {"static": False},
    "graphs": {"static": "auto"},
    "exact": {"static": "auto", "exact": True},
}
PROMPTS = [[(7 * place + 3 * prompt) % 90 + 5 for place in range(40)] for prompt in range(5)]
FAMILIES = ("qwen3", "gemma2", "gemma3", "mixtral", "gpt-oss", "phi3")
GPU_TESTS = (
    "unit/targets/test_tree_attention.py",
    "unit/targets/test_invariant.py",
    "unit/draws",
    "unit/test_cache.py",
)
WIDE_TESTS = (
    "lossless/test_static.py",
    "lossless/test_matrix.py",
    "lossless/test_lanes.py",
    "unit/targets/test_causal.py",
)


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        minutes: its limit.
        run: what it does here, given --emulate and what ``prepare`` returned; returns its figures.
        prepare: what it needs of the CPU alone, which the emulator would not take.
        command: instead, arguments of another process of Python, with and without a GPU.
    """

    minutes: float
    run: Callable[[bool, Any], Any] | None = None
    prepare: Callable[[bool], Any] = bool
    command: tuple[list[str], list[str]] | None = None


def versions(emulate: bool, _: Any) -> dict[str, Any]:
    """The machine, and the libraries' versions."""
    card = {} if emulate else {"nvidia-smi": _output(["nvidia-smi"])}
    names = ("torch", "triton", "transformers", "outpace")
    return {"device": torch.cuda.get_device_name(0), **{name: version(name) for name in names}, **card}


def model(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano_path(), dtype=dtype).eval()


def small(emulate: bool) -> Any:
    """The embedded model, on the CPU."""
    del emulate
    return model(torch.bfloat16)


def plain_tokens(emulate: bool) -> list[list[int]]:
    """The CPU's tokens."""
    engine = outpace.Engine(outpace.Target(model(torch.float32), check=False))
    params = outpace.SamplingParams(max_new_tokens=8 if emulate else 64)
    return [one.tokens for one in engine.generate(PROMPTS[: 1 if emulate else None], params)]


def tokens(emulate: bool, expected: list[list[int]]) -> list[dict[str, Any]]:
    """Tokens of every drafter against the CPU's, and the waits for the device of each of its steps."""
    found = []
    prompts, drafters = PROMPTS[: len(expected)], DRAFTERS[: 3 if emulate else None]
    params = outpace.SamplingParams(max_new_tokens=8 if emulate else 64)
    for way, options in WAYS.items():
        if emulate and way == "exact":  # the interpreter takes minutes
            continue
        target = outpace.Target(model(torch.float32).to("cuda:0"), check=False, **options)
        for drafter in drafters:
            engine = outpace.Engine(target, drafter, adaptive=False)
            engine.generate(prompts[:1], params)
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                mode = nullcontext() if emulate else _watched()
                with mode:
                    answers = engine.generate(prompts, params)
            equal = sum(one.tokens == own for one, own in zip(answers, expected, strict=True))
            steps = sum(one.stats.steps for one in answers)
            row = {
                "way": way,
                "drafter": drafter,
                "equal": equal,
                "of": len(prompts),
                "waits": len(waits) / steps,
            }
            found.append(row | {"reason": target.plan.no_graphs})
    return found


def profile(emulate: bool, made: Any) -> list[dict[str, Any]]:
    """Kernels of 20 steps: their number, and the longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    found = []
    for way, drafter, temperature in (
        ("launched", "none", 0.0),
        ("graphs", "none", 0.0),
        ("graphs", "lookahead", 0.0),
        ("graphs", "lookahead", 1.0),
    ):
        target = outpace.Target(made.to("cuda:0"), check=False, **WAYS[way])
        engine = outpace.Engine(target, drafter, adaptive=False)
        steps = 3 if emulate else 20
        params = outpace.SamplingParams(
            max_new_tokens=4 * steps, temperature=temperature, seed=1, ignore_eos=True
        )
        engine.generate(PROMPTS[:1], params)
        engine.add(PROMPTS[0], params)
        engine.step()
        activities = [ProfilerActivity.CPU, *([] if emulate else [ProfilerActivity.CUDA])]
        began = time.perf_counter()
        with profiler(activities=activities) as seen:
            for _ in range(steps):
                engine.step()
        seconds = time.perf_counter() - began
        table = seen.key_averages().table(
            sort_by="self_cpu_time_total" if emulate else "self_device_time_total", row_limit=15
        )
        found.append(
            {
                "way": way,
                "drafter": drafter,
                "temperature": temperature,
                "seconds": seconds / steps,
                "table": table,
            }
        )
    return found


def memory(emulate: bool, made: Any) -> dict[str, Any]:
    """32 sequences that grow over a doubling of their rows in 0.9 of the memory; captured shapes."""
    target: Any = outpace.Target(made.to("cuda:0"), check=False)
    count, length = (3, 30) if emulate else (32, 900)
    engine = outpace.Engine(target, "prompt_lookup", memory=0.9, slots=4)
    params = outpace.SamplingParams(max_new_tokens=length, ignore_eos=True)
    answers = engine.generate([PROMPTS[place % 5] for place in range(count)], params)
    shapes = [one.bytes for known in target._fixed.known.values() for one in known.values()]
    return {
        "complete": sum(len(one.tokens) == length for one in answers),
        "of": count,
        "captured shapes": len(shapes),
        "bytes of captured shapes": sum(shapes),
        "cache bytes": engine._batch.cache.bytes,
        "summary": "" if emulate else torch.cuda.memory_summary(abbreviated=True),
    }


def built_families(emulate: bool) -> dict[str, Any]:
    """Tiny models, by family."""
    zoo = import_module("zoo.families")  # of the tests
    names = [name for name in zoo.FAMILIES if name.startswith(FAMILIES)]
    return {name: zoo.FAMILIES[name].build() for name in names[: 2 if emulate else None]}


def families(emulate: bool, built: dict[str, Any]) -> list[dict[str, Any]]:
    """The self-test of tiny models of families, as graphs and launched."""
    found = []
    for name, made in built.items():
        for way in ("launched", "graphs"):
            try:
                target = outpace.Target(made.to("cuda:0"), check=True, **WAYS[way])
                reason = target.plan.no_graphs
            except OutpaceError as error:
                reason = str(error)
            found.append({"family": name, "way": way, "reason": reason})
    return found


def _tests(files: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Tests that need a GPU; without one they are collected."""
    common = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{file}" for file in files),
        "-m",
        "gpu",
    ]
    return [*common, "-x", "--timeout", "300"] if _has("pytest_timeout") else [*common, "-x"], [
        *common,
        "--collect-only",
    ]


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _figures(*more: str) -> tuple[list[str], list[str]]:
    script = str(ROOT / "lab" / "measure" / "gpu.py")
    tiny = ["--device", "cpu", "--shapes", "tiny", "--dtypes", "float32", "--batches", "1", "--context", "32"]
    real = ["--shapes", "llama-7b", "--batches", "1", "--context", "512", "--tokens", "64", "--rounds", "2"]
    few = ["--drafters", "prompt_lookup", "--engines", "ungoverned"]
    drafters = ["--drafters", "prompt_lookup", "lookahead", "draft_model", "--engines", "ungoverned"]
    return [script, *real, *drafters, *more], [script, *tiny, "--tokens", "4", "--rounds", "1", *few]


# The figures of a 7B model write their own JSON, next to the step's.
STEPS: dict[str, Step] = {
    "versions": Step(1, run=versions),
    "gpu-tests": Step(3, command=_tests(GPU_TESTS)),
    "wide-tests": Step(4, command=_tests(WIDE_TESTS)),
    "tokens": Step(3, run=tokens, prepare=plain_tokens),
    "figures-7b": Step(MOST, command=_figures()),
    "profile": Step(4, run=profile, prepare=small),
    "memory": Step(3, run=memory, prepare=small),
    "families": Step(3, run=families, prepare=built_families),
}


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextmanager
def _watched() -> Iterator[None]:
    """Context in which every wait for the device warns."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def alone(name: str, out: Path, emulate: bool) -> None:
    """Run a step in this process, and write its figures."""
    sys.path.insert(0, str(ROOT / "tests"))
    step = STEPS[name]
    assert step.run is not None
    prepared = step.prepare(emulate)
    if emulate:
        tree_attention.why_no_triton = lambda: "interpreted, the kernel takes minutes"
        with import_module("accelerator").Accelerator("cuda"):  # of the tests
            found = step.run(emulate, prepared)
    else:
        found = step.run(emulate, prepared)
    write(out / f"{name}.json", {"step": name, "found": found})


def write(path: Path, what: Any) -> None:
    replace_text(path, json.dumps(what, indent=1, default=str) + "\n")


def every(names: list[str], out: Path, emulate: bool) -> bool:
    """Run steps one after another while there is time; True if all of them succeeded."""
    ends, fine = time.monotonic() + 60 * MINUTES, True
    for name in names:
        step, left = STEPS[name], ends - time.monotonic()
        file = out / f"{name}.json"
        if left < 30:
            write(file, {"step": name, "failed": f"no time was left of {MINUTES} minutes"})
            fine = False
            continue
        command = [sys.executable, __file__, "--out", str(out), "--only", name]
        if step.command is not None:
            command = [sys.executable, *step.command[emulate]]
        if step.run is not None and emulate:
            command.append("--emulate")
        elif step.command is not None and "gpu.py" in command[1]:
            command += ["--out", str(out / f"{name}-figures.json")]
        began, limit = time.monotonic(), min(60 * step.minutes, left)
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if emulate else {})
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
            )
            failed = "" if done.returncode == 0 else f"exit status {done.returncode}"
            printed = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            failed, printed = f"it took more than {limit / 60:.1f} minutes", str(error.stdout or "")
        known = json.loads(file.read_text()) if file.exists() and not failed else {"step": name}
        write(
            file, known | {"failed": failed, "seconds": time.monotonic() - began, "printed": printed[-4000:]}
        )
        print(f"{name:12} {time.monotonic() - began:6.1f} s  {failed or 'done'}", flush=True)
        fine &= not failed
    return fine


def page_of(out: Path, names: list[str]) -> str:
    """The page of measurements, from what the steps have written."""
    parts = ["# Measurements on a GPU", "Written by `lab/measure/first_hour.py`."]
    for name in names:
        file = out / f"{name}.json"
        if not file.exists():
            parts.append(f"## {name}\n\nNot run.")
            continue
        known = json.loads(file.read_text())
        figures = out / f"{name}-figures.json"
        rows = known.get("found", json.loads(figures.read_text())["rows"] if figures.exists() else None)
        text = known["failed"] and f"Failed: {known['failed']}."
        parts.append(
            f"## {name}\n\n" + "\n\n".join(filter(None, [text, shown(rows or known.get("printed", ""))]))
        )
    return "\n\n".join(parts) + "\n"


def shown(found: Any) -> str:
    """Figures as tables: a list of rows with the same columns, or names and values."""
    if isinstance(found, str):
        return "```text\n" + found.strip()[-2000:] + "\n```"
    if isinstance(found, dict):
        found = [{"": name, "value": value} for name, value in found.items()]
    columns = [name for name in found[0] if not isinstance(found[0][name], list | dict) and name != "table"]
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in found)]
    tables = ["| " + " | ".join(line) + " |" for line in lines]
    longer = [
        shown(row[name]) for row in found for name in row if isinstance(row[name], list) or name == "table"
    ]
    return "\n\n".join(["\n".join(tables), *longer])


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())[:300].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the steps' figures")
    parser.add_argument("--page", type=Path, help="write the page of measurements to this file")
    parser.add_argument("--emulate", action="store_true", help="a dry run without a GPU, on tiny models")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--only", choices=STEPS, help=argparse.SUPPRESS)  # a step's own process
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only:
        alone(options.only, options.out.resolve(), options.emulate)
        return
    if not options.emulate and not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device; give --emulate for a dry run")
    fine = every(options.steps, options.out.resolve(), options.emulate)
    if options.page:
        replace_text(options.page, page_of(options.out, options.steps))
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
