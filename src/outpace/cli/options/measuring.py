"""The options of the commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options.shared import MODEL, OUTPUT, SAMPLING

_DATA = "Data"
_METHODS = "Methods"

ProfileToo = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="Measure the drafter of what `outpace tune` wrote, too.", rich_help_panel=MODEL
    ),
]
GrownLike = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="SHAPE",
        help="Grow the model to this shape in memory; see `outpace grow`.",
        rich_help_panel=MODEL,
    ),
]
ShapeName = Annotated[
    str,
    typer.Option(
        "--like",
        help="llama-0.1b, llama-0.5b, llama-1b, llama-7b, llama-13b, llama-34b, llama-70b.",
        show_default=False,
    ),
]
ModelOut = Annotated[
    Path,
    typer.Option("--out", "-o", help="The model's folder.", rich_help_panel=OUTPUT, show_default=False),
]
GrownDtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32 keeps every token; in bfloat16 and float16 near-ties may go the other way. Or float64.",
        rich_help_panel=MODEL,
    ),
]
NoiseSeed = Annotated[int, typer.Option("--seed", help="Of the noise that no output depends on.", min=0)]
Suites = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="LIST",
        help="builtin, rewriting, retrieval, spec_bench, mt_bench, humaneval, gsm8k, speed_bench, "
        "file:PATH (a .jsonl of prompts, turns or token ids).",
        rich_help_panel=_DATA,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="OUTPACE_DATA",
        help="A folder with public sets. Without it they come from the hub.",
        rich_help_panel=_DATA,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", help="Prompts of each suite, at most.", min=1, rich_help_panel=_DATA),
]
Drafters = Annotated[
    str,
    typer.Option(
        "--drafters",
        metavar="LIST",
        help="Drafters and their options; none, plain decoding, is always measured.",
        rich_help_panel=_METHODS,
    ),
]
Peers = Annotated[
    str,
    typer.Option(
        "--peers",
        metavar="LIST",
        help="transformers (plain, prompt_lookup, assisted), vllm=VENV (plain, ngram, suffix), "
        "llama.cpp=VENV (plain, prompt_lookup), one method as in transformers:plain; or none.",
        rich_help_panel=_METHODS,
    ),
]
Assistant = Annotated[
    str | None,
    typer.Option(
        "--assistant",
        help="Draft model of transformers:assisted. Default: the embedded one, for the embedded model.",
        rich_help_panel=_METHODS,
    ),
]
Gguf = Annotated[
    Path | None,
    typer.Option(
        "--gguf",
        help="The model's weights for llama.cpp. Default: written from the model, by the extra gguf.",
        rich_help_panel=_METHODS,
    ),
]
Batches = Annotated[
    str,
    typer.Option("--batch", metavar="LIST", help="Prompts decoded together.", rich_help_panel=_METHODS),
]
BenchRepeats = Annotated[
    int,
    typer.Option("--repeats", help="Measure so often, after a warm-up.", min=1, rich_help_panel=_METHODS),
]
BenchSeed = Annotated[
    int,
    typer.Option(
        "--seed", help="Of the first prompt, and of the order of the methods.", rich_help_panel=SAMPLING
    ),
]
Ends = Annotated[
    bool,
    typer.Option(
        "--eos",
        help="Answers end at the model's end tokens; else all have the same length.",
        rich_help_panel=SAMPLING,
    ),
]
JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write results as JSON; - is standard output, the tables then go to standard error.",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a report with plots.", rich_help_panel=OUTPUT),
]
Windows = Annotated[
    str,
    typer.Option("--windows", metavar="LIST", help="W, and G with it.", rich_help_panel=_METHODS),
]
Ngrams = Annotated[str, typer.Option("--ngrams", metavar="LIST", help="N.", rich_help_panel=_METHODS)]
FromText = Annotated[
    bool,
    typer.Option(
        "--from-text",
        help="Fill the pool from prompt and output too, beside the window.",
        rich_help_panel=_METHODS,
    ),
]
ScalingBatch = Annotated[
    int,
    typer.Option("--batch", help="Prompts decoded together.", min=1, rich_help_panel=_METHODS),
]
FirstResult = Annotated[Path, typer.Argument(metavar="A.json", show_default=False)]
SecondResult = Annotated[Path, typer.Argument(metavar="B.json", show_default=False)]
TuneDrafters = Annotated[
    str,
    typer.Option(
        "--drafters",
        metavar="LIST",
        help="Drafters to try: a name stands for its options of several widths, a spec for itself.",
        show_default=False,
        rich_help_panel=_METHODS,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        help="throughput: tokens per second of all prompts together; latency: of each one.",
        rich_help_panel=_METHODS,
    ),
]
TuneSeed = Annotated[
    int, typer.Option("--seed", help="Of the order of the prompts.", min=0, rich_help_panel=SAMPLING)
]
TuneBatches = Annotated[
    str,
    typer.Option(
        "--batch",
        metavar="LIST",
        help="Prompts decoded together; of several numbers the best is chosen.",
        rich_help_panel=_METHODS,
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget",
        help="Seconds to tune in; loading and --verify take theirs besides.",
        min=0.001,
        rich_help_panel=_METHODS,
    ),
]
CheckChoice = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Keep some prompts, and measure the choice on them, after the budget's time.",
        rich_help_panel=_METHODS,
    ),
]
ProfileOut = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="The profile. Those of other models in it are kept.", rich_help_panel=OUTPUT
    ),
]
