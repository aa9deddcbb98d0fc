"""``outpace bench lab`` and ``outpace bench compare``: benchmarks with a roof, grades and reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import bench as b
from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import benchmarks, finish, guarded
from outpace.cli.given import taking
from outpace.cli.parts import numbers
from outpace.cli.place import spread_of
from outpace.names import is_gguf
from outpace_lab.cli.options import Html, Like
from outpace_lab.cli.reports import check_outputs
from outpace_lab.cli.sources import source_of

Peers = Annotated[
    str,
    o.method_option(
        "--peers",
        metavar="LIST",
        help="transformers (plain, prompt_lookup, assisted), vllm=VENV (plain, ngram, suffix), "
        "llama.cpp=VENV (plain, prompt_lookup), llama-server=VENV (plain, ngram-mod, ngram-simple), "
        "one method as in transformers:plain; or none.",
        show_default=f"{b.TRANSFORMERS}; of a .gguf file llama.cpp",
    ),
]
Gguf = Annotated[
    Path | None,
    o.method_option(
        "--gguf",
        metavar="FILE",
        help="The model's weights for llama.cpp. Default: converted from the model (extra gguf).",
    ),
]
Grade = Annotated[
    bool,
    o.method_option(
        "--grade",
        help="Grade answers: GSM8K's numbers, HumanEval's tests (pass@1), ROUGE-L with Spec-Bench's "
        "references.",
    ),
]
RunCode = Annotated[
    bool,
    o.method_option(
        "--run-code",
        help="Let --grade run the programs that the model writes. They have limits, but no sandbox.",
    ),
]
FirstResult = Annotated[Path, typer.Argument(metavar="A.json", help="The first result.", show_default=False)]
SecondResult = Annotated[
    Path, typer.Argument(metavar="B.json", help="The second result.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class LabOptions(b.BenchOptions):
    """The options of ``outpace bench lab``."""

    peers: Peers = ""
    gguf: Gguf = None
    grade: Grade = False
    run_code: RunCode = False
    like: Like = ""
    html: Html = None

    def check(self) -> None:
        super().check()
        check_outputs(self.json_to, self.html)


@benchmarks.command(
    "lab",
    epilog="Example: outpace bench lab --suite gsm8k --grade --html report.html",
)
@guarded
@taking(LabOptions)
def bench_lab(given: LabOptions) -> None:
    """Measure as `outpace bench` does, with the machine's roof, grades of answers and a report.

    Ends with exit code 1 if a method fails or its tokens differ from plain decoding's.
    """
    given.check()
    place, step = spread_of(given.device, given.device_map), given.steps()
    how = given.dtype, given.trust_remote_code, given.llamacpp, True, step, given.backend
    source = source_of(given.like, given.model, place, *how)
    source.check_names(verifier=given.verifier)
    batches = numbers("batch", given.batch)
    with screen.busy("reading the prompts ..."):
        from outpace_lab.cli import bench_run as runner

        peers = "llama.cpp" if is_gguf(given.model or "") else b.TRANSFORMERS
        chosen = runner.plan(given, peers, batches)
        extras = runner.extras_of(chosen, given.gguf, given.grade, given.run_code)
    loaded, chosen = b.loaded_for(chosen, source, given)
    found = runner.run(chosen, extras, loaded, given.json_to, given.html)
    finish(not found.interrupted, equal=found.equal)


@benchmarks.command("compare", epilog="Example: outpace bench compare monday.json friday.json")
@guarded
def compare_benchmarks(first: FirstResult, second: SecondResult, as_json: o.AsJson = False) -> None:
    """Compare two results of `outpace bench --json FILE` side by side."""
    with screen.busy("reading ..."):
        from outpace.bench.record import read_rows
        from outpace_lab.bench import comparison
        from outpace_lab.cli import bench_tables

        (one, rows), (two, others) = read_rows(first), read_rows(second)
        found = comparison.compare(one, two, (rows, others))
    if as_json:
        typer.echo(json.dumps(comparison.as_json(found), indent=2))
    else:
        bench_tables.compared(found, screen.out())
