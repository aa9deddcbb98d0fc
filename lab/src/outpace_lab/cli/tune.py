"""``outpace tune``: find the fastest drafter for a model, a machine and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, finish, guarded
from outpace.cli.parts import check_length, check_listed, numbers, sampling
from outpace.core import TargetOptions
from outpace_lab.cli.options import Like
from outpace_lab.cli.sources import source_of
from outpace_lab.names import LATENCY, THROUGHPUT, check_known

TuneDrafters = Annotated[
    str,
    o.drafter_option(
        "--drafters",
        metavar="LIST",
        rich_help_panel="Methods",
        help="Drafters to try: a name tries options of several widths, a spec only that one.",
        show_default=False,
    ),
]
Objective = Annotated[
    str,
    o.method_option(
        "--objective",
        metavar="NAME",
        help="throughput: tokens per second of all prompts together; latency: of each prompt.",
    ),
]
TuneSeed = Annotated[
    int, o.sampling_option("--seed", metavar="N", help="Seed of the order of prompts.", min=0)
]
TuneBatches = Annotated[
    str,
    o.method_option(
        "--batch", metavar="LIST", help="Prompts decoded together; the best of several numbers is chosen."
    ),
]
Budget = Annotated[
    float,
    o.method_option(
        "--budget", metavar="SECONDS", help="Seconds for tuning, excluding loading and --verify.", min=0.001
    ),
]
CheckChoice = Annotated[
    bool,
    o.method_option(
        "--verify", help="Hold back some prompts, and measure the choice on them after the budget."
    ),
]
ProfileOut = Annotated[
    Path,
    o.output_option("--out", "-o", metavar="PATH", help="Profile. Those of other models in it are kept."),
]


@app.command(
    "tune",
    epilog="Example: outpace tune --suite file:prompts.jsonl --budget 300 --verify --out m.toml",
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
    like: Like = "",
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    llamacpp: o.LlamaCpp = "",
    quantise: o.Quantise = None,
    stock: o.Stock = False,
    threads: o.Threads = None,
    max_new_tokens: o.MaxNewTokens = 64,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
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
    sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    check_length(max_new_tokens)
    check_listed(suite, drafters)
    check_known("objective", objective, (THROUGHPUT, LATENCY))
    how = (model, device, dtype, trust_remote_code, llamacpp)
    source = source_of(like, *how, options=TargetOptions(quantise=quantise, stock=stock))
    source.check_names()
    batches = numbers("batch", batch)
    with screen.busy("reading the prompts ..."):
        from outpace.bench.run import Settings
        from outpace_lab.cli import tune_run as tune

        settings = Settings(max_new_tokens, temperature, top_p, seed, ends=eos)
        chosen = tune.plan(
            suite, data, limit, drafters or tune.DRAFTERS, objective, batches, settings, budget, out, verify
        )
    loaded = source.load()
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
