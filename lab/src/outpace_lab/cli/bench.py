"""``outpace bench lab`` and ``outpace bench compare``: benchmarks with a roof, grades and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import bench as b
from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import benchmarks, finish, guarded
from outpace.cli.parts import check_length, check_listed, numbers, profiled, sampling
from outpace.cli.place import spread_of
from outpace.core import DEFAULT_DRAFTER, TargetOptions
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


@benchmarks.command(
    "lab",
    epilog="Example: outpace bench lab --suite gsm8k --grade --html report.html",
)
@guarded
def bench_lab(
    suite: o.Suites = "builtin",
    data: o.Data = None,
    limit: o.Limit = None,
    drafters: b.Drafters = f"none,{DEFAULT_DRAFTER},lookahead,prompt_lookup",
    lengths: b.Lengths = None,
    profile: b.ProfileToo = None,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    peers: Peers = "",
    assistant: b.Assistant = None,
    gguf: Gguf = None,
    batch: b.Batches = "1",
    repeats: b.BenchRepeats = 1,
    grade: Grade = False,
    run_code: RunCode = False,
    model: o.ModelName = None,
    like: Like = "",
    device: o.Device = None,
    device_map: o.DeviceMap = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    llamacpp: o.LlamaCpp = "",
    quantise: o.Quantise = None,
    stock: o.Stock = False,
    threads: o.Threads = None,
    max_new_tokens: o.MaxNewTokens = 64,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: b.BenchSeed = 0,
    eos: o.Ends = False,
    json_to: o.JsonTo = None,
    html: Html = None,
) -> None:
    """Measure as `outpace bench` does, with the machine's roof, grades of answers and a report.

    Ends with exit code 1 if a method fails or its tokens differ from plain decoding's.
    """
    sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    check_length(max_new_tokens)
    check_outputs(json_to, html)
    check_listed(suite, drafters, peers)
    place, step = spread_of(device, device_map), TargetOptions(quantise=quantise, stock=stock)
    source = source_of(like, model, place, dtype, trust_remote_code, llamacpp, True, step)
    source.check_names(verifier=verifier)
    batches = numbers("batch", batch)
    with screen.busy("reading the prompts ..."):
        from outpace.bench.run import Settings
        from outpace_lab.cli import bench_run as runner

        settings = Settings(max_new_tokens, temperature, top_p, seed, repeats, eos)
        beside = peers or ("llama.cpp" if is_gguf(model or "") else b.TRANSFORMERS)
        methods = (drafters, lengths, verifier, adaptive, beside, assistant)
        chosen = runner.plan(suite, data, limit, *methods, batches, settings)
        extras = runner.extras_of(chosen, gguf, grade, run_code)
    notes: list[str] = []
    plain = "" if profile else "none"
    loaded, spec = profiled(source, plain, profile, verifier, at_once=chosen.batches, remark=notes.append)
    found = runner.run(chosen.with_drafter(spec, notes), extras, loaded, json_to, html)
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
