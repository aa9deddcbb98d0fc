"""``outpace tune``: find the fastest drafter for a model, a machine and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, finish, guarded
from outpace.cli.parts import check_length, parts, sampling

TuneDrafters = Annotated[
    str,
    typer.Option(
        "--drafters",
        metavar="LIST",
        help="Drafters to try: a name tries options of several widths, a spec only that one.",
        show_default=False,
        rich_help_panel=o.METHODS,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        help="throughput: tokens per second of all prompts together; latency: of each prompt.",
        rich_help_panel=o.METHODS,
    ),
]
TuneSeed = Annotated[
    int, typer.Option("--seed", help="Seed of the order of prompts.", min=0, rich_help_panel=o.SAMPLING)
]
TuneBatches = Annotated[
    str,
    typer.Option(
        "--batch",
        metavar="LIST",
        help="Prompts decoded together; the best of several numbers is chosen.",
        rich_help_panel=o.METHODS,
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget",
        help="Seconds for tuning, excluding loading and --verify.",
        min=0.001,
        rich_help_panel=o.METHODS,
    ),
]
CheckChoice = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Hold back some prompts, and measure the choice on them after the budget.",
        rich_help_panel=o.METHODS,
    ),
]
ProfileOut = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="Profile. Those of other models in it are kept.", rich_help_panel=o.OUTPUT
    ),
]


@app.command(
    "tune",
    epilog="Example: [bold]outpace tune --suite file:prompts.jsonl --budget 300 --verify --out m.toml[/bold]",
)
@guarded
def tune_drafter(
    suite: o.Suites = "builtin",
    data: o.Data = None,
    limit: o.Limit = None,
    drafters: TuneDrafters = "",
    objective: Objective = "throughput",
    batch: TuneBatches = "1",
    budget: Budget = 300.0,
    verify: CheckChoice = False,
    out: ProfileOut = Path("outpace-profile.toml"),
    model: o.ModelName = None,
    like: o.GrownLike = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    llamacpp: o.LlamaCpp = "",
    max_new_tokens: o.MaxNewTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: TuneSeed = 0,
    eos: o.Ends = False,
    as_json: o.AsJson = False,
) -> None:
    """Find the fastest drafter and its options for a model, a machine and prompts.

    Writes a profile, which --profile of the other commands and
    outpace.accelerate(model, profile=...) read. With --verify, ends with exit
    code 1 if outputs on the held-back prompts break the promise to equal plain
    decoding's.
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
    loaded = parts("none", "match", model, device, dtype, trust_remote_code, like=like, llamacpp=llamacpp)
    found = tune.run(chosen, loaded)
    if found is None:
        return finish(False)
    try:
        tune.finish(found, chosen, loaded)
    finally:  # show the result even if writing or verifying fails
        if as_json:
            typer.echo(json.dumps(tune.as_json(found, chosen), indent=2))
        else:
            tune.show(found, chosen, screen.out())
    finish(found.whole, equal=not found.broken)
