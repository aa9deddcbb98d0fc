"""Commands that measure: bench, bench scaling, bench compare and tune; grow makes a model to measure."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from outpace.cli import screen
from outpace.cli.app import app, benchmarks, finish, guarded, show
from outpace.cli.options import measuring as own
from outpace.cli.options import shared as o
from outpace.cli.parts import parts, profiled, sampling
from outpace.core import OutpaceError


def check_length(max_new_tokens: int) -> None:
    """Refuse answers that leave nothing to measure after the first step."""
    if max_new_tokens < 2:
        raise OutpaceError("--max-new-tokens must be at least 2: the first token comes with the prompt")


@app.command("grow", epilog="Example: [bold]outpace grow --like llama-0.1b --out nano-0.1b[/bold]")
@guarded
def grow_model(
    like: own.ShapeName,
    out: own.ModelOut,
    model: o.ModelName = None,
    dtype: own.GrownDtype = "float32",
    seed: own.NoiseSeed = 0,
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """A model that says what a small one says, at the cost of a larger Llama shape.

    For measuring: it has the steps and tokens of the small one, and the step
    times of the large one. Ctrl-C leaves nothing behind.
    """
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.cli import grow
    found = grow.run(model, like, out, dtype, seed, trust_remote_code)
    show(found, as_json, grow.table)


@benchmarks.callback(
    invoke_without_command=True,
    epilog="Example: [bold]outpace bench --suite builtin --json result.json --html report.html[/bold]",
)
@guarded
def bench(
    context: typer.Context,
    suite: own.Suites = "builtin",
    data: own.Data = None,
    limit: own.Limit = None,
    drafters: own.Drafters = "none,lookahead,prompt_lookup",
    profile: own.ProfileToo = None,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    peers: own.Peers = "transformers:plain,transformers:prompt_lookup",
    assistant: own.Assistant = None,
    gguf: own.Gguf = None,
    batch: own.Batches = "1",
    repeats: own.BenchRepeats = 1,
    model: o.ModelName = None,
    like: own.GrownLike = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: own.BenchSeed = 0,
    eos: own.Ends = False,
    json_to: own.JsonTo = None,
    html: own.Html = None,
) -> None:
    """Measure methods on suites of prompts: speed, steps, acceptance, equality.

    All methods decode the same prompts in turns, with the same stop rule.
    Ends with exit code 1 if one fails, or says what plain decoding does not.
    """
    if context.invoked_subcommand is not None:
        return refuse_given(context)
    sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    check_length(max_new_tokens)
    with screen.busy("reading the prompts ..."):
        from outpace.bench.run import Settings
        from outpace.cli import bench_run as runner

        runner.check_outputs(json_to, html)
        settings = Settings(max_new_tokens, temperature, seed, repeats, eos)
        methods = (drafters, verifier, adaptive, peers, assistant, gguf)
        chosen = runner.plan(suite, data, limit, *methods, batch, settings)
    loading = ("" if profile else "none", profile, verifier, model, device, dtype, trust_remote_code)
    notes: list[str] = []
    loaded, spec = profiled(*loading, like=like, at_once=chosen.batches, remark=notes.append)
    found = runner.run(chosen.with_drafter(spec, notes), loaded, json_to, html)
    finish(not found.interrupted, equal=found.whole and not found.failed and not found.broken)


@app.command(
    "tune",
    epilog="Example: [bold]outpace tune --suite file:prompts.jsonl --budget 300 --verify --out m.toml[/bold]",
)
@guarded
def tune_drafter(
    suite: own.Suites = "builtin",
    data: own.Data = None,
    limit: own.Limit = None,
    drafters: own.TuneDrafters = "",
    objective: own.Objective = "throughput",
    batch: own.TuneBatches = "1",
    budget: own.Budget = 300.0,
    verify: own.CheckChoice = False,
    out: own.ProfileOut = Path("outpace-profile.toml"),
    model: o.ModelName = None,
    like: own.GrownLike = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: own.TuneSeed = 0,
    eos: own.Ends = False,
    as_json: o.AsJson = False,
) -> None:
    """Find the fastest drafter and its options for a model, a machine and prompts.

    Writes a profile, which --profile of the other commands and
    outpace.accelerate(model, profile=...) read. With --verify, which takes its
    time after the budget, ends with exit code 1 if outputs on the prompts kept
    for it break the promise to equal plain decoding's.
    """
    sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    check_length(max_new_tokens)
    with screen.busy("reading the prompts ..."):
        from outpace.bench.run import Settings
        from outpace.cli import bench_run as runner
        from outpace.cli import tune_run as tune

        settings = Settings(max_new_tokens, temperature, seed, ends=eos)
        batches = runner.batch_sizes(batch)
        chosen = tune.plan(
            suite, data, limit, drafters or tune.DRAFTERS, objective, batches, settings, budget, out, verify
        )
    loaded = parts("none", "match", model, device, dtype, trust_remote_code, like=like)
    found = tune.run(chosen, loaded)
    if found is None:
        return finish(False)
    try:
        tune.finish(found, chosen, loaded)
    finally:  # what was found is shown whatever becomes of the rest
        if as_json:
            typer.echo(json.dumps(tune.as_json(found, chosen), indent=2))
        else:
            tune.show(found, chosen, screen.out())
    finish(found.whole, equal=not found.broken)


def refuse_given(context: typer.Context) -> None:
    """Refuse options before a subcommand, which would not read them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise OutpaceError(f"--{name.replace('_', '-')} does not go with {context.invoked_subcommand}")


@benchmarks.command(
    "scaling", epilog="Example: [bold]outpace bench scaling --suite gsm8k --limit 20 --html law.html[/bold]"
)
@guarded
def scaling_law(
    suite: own.Suites = "builtin",
    data: own.Data = None,
    limit: own.Limit = 14,
    windows: own.Windows = "1,2,4,8,16",
    ngrams: own.Ngrams = "3,4,5,6",
    from_text: own.FromText = False,
    batch: own.ScalingBatch = 1,
    model: o.ModelName = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 64,
    json_to: own.JsonTo = None,
    html: own.Html = None,
) -> None:
    """Steps of lookahead decoding over window and n-gram size, against FLOPs per step.

    Fits the law of Fu et al. 2024, section 4, to what is measured, prints the
    error of the fit, and says whether steps fall linearly in log FLOPs.
    """
    check_length(max_new_tokens)
    with screen.busy("reading the prompts ..."):
        from outpace.bench.run import Settings
        from outpace.bench.suites import load_suite
        from outpace.cli import bench_run as runner
        from outpace.cli import scaling

        grid = scaling.grid_of(windows, ngrams)
        runner.check_outputs(json_to, html)
        prompts_of = load_suite(suite, data)
    loaded = parts("none", "match", model, device, dtype, trust_remote_code)
    settings = Settings(max_new_tokens)
    finish(scaling.run(loaded, prompts_of, limit, settings, grid, from_text, batch, json_to, html))


@benchmarks.command("compare", epilog="Example: [bold]outpace bench compare monday.json friday.json[/bold]")
@guarded
def compare_benchmarks(first: own.FirstResult, second: own.SecondResult, as_json: o.AsJson = False) -> None:
    """Two results of `outpace bench --json FILE` side by side, and whether they agree."""
    with screen.busy("reading ..."):
        from outpace.bench import comparison
        from outpace.bench.record import read_rows
        from outpace.cli import bench_tables as bench_report

        (one, rows), (two, others) = read_rows(first), read_rows(second)
        found = comparison.compare(one, two, (rows, others))
    if as_json:
        typer.echo(json.dumps(comparison.as_json(found), indent=2))
    else:
        bench_report.compared(found, screen.out())
