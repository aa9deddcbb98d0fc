"""Options shared by several commands. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL = "Model"
SAMPLING = "Sampling"
OUTPUT = "Output"

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hub name or folder, smollm2 (see `make real`), or a .gguf file, which llama.cpp runs. "
        "Default: the embedded model.",
        rich_help_panel=MODEL,
    ),
]
VerifierName = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="SPEC",
        help="match: the tokens of plain decoding; rejection, spectr, block, traversal: their "
        "distribution; lossy: typical, top_beta, bild, lenient, with options as in typical:epsilon=0.3.",
        rich_help_panel=MODEL,
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Let a governor decide, from measured times, how much each step drafts, or verify all that the "
        "drafter proposes. Default: a governor if the verifier is match.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="In torch's notation. Default: cuda if available.", rich_help_panel=MODEL),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="Divide the layers among devices: auto, balanced, sequential, or JSON from module to device.",
        rich_help_panel=MODEL,
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="MODE",
        help="Under torchrun: draft (each process has the model, and verifies a share of a draft) or tensor "
        "(each has a part of every layer).",
        rich_help_panel=MODEL,
    ),
]
ParallelTimeout = Annotated[
    float,
    typer.Option(
        "--parallel-timeout",
        help="With --parallel: seconds in which every process must answer.",
        min=1,
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (the model's own on a GPU, float32 on a CPU), float32, bfloat16, float16, float64.",
        rich_help_panel=MODEL,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=MODEL
    ),
]
LlamaCpp = Annotated[
    str,
    typer.Option(
        "--llamacpp",
        metavar="OPTIONS",
        help="With a .gguf file: options, as in threads=4,n_gpu_layers=-1,type_v=q8_0 (docs/llamacpp.md).",
        rich_help_panel=MODEL,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", help="Maximum tokens to emit.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)
]
AsJson = Annotated[bool, typer.Option("--json", help="Results as JSON.", rich_help_panel=OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Let --out replace a file.", rich_help_panel=OUTPUT)
]
_SPEC = (
    "A drafter and its options, as in lookahead:window=7,ngram=5; nested drafters in parentheses, as in "
    "combined:(lookahead)+(prompt_lookup); see `outpace drafters`."
)
DATA = "Data"
METHODS = "Methods"
DefaultDrafterSpec = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        metavar="SPEC",
        help=_SPEC,
        show_default="lookahead",
        rich_help_panel=MODEL,
    ),
]
OnlineLearning = Annotated[
    bool,
    typer.Option(
        "--online",
        help="Let a drafter with trained weights learn in the background from its mistakes: "
        "draft_model, or METHOD:path=FOLDER. No token changes.",
        rich_help_panel=MODEL,
    ),
]
OnlineOptions = Annotated[
    str,
    typer.Option(
        "--online-options",
        metavar="OPTIONS",
        help="With --online: options of learning, as in every=512,learning_rate=3e-5.",
        rich_help_panel=MODEL,
    ),
]
OnlineOut = Annotated[
    Path | None,
    typer.Option(
        "--online-out",
        help="With --online: a new folder, to which the drafter is saved at the end.",
        rich_help_panel=MODEL,
    ),
]
TopK = Annotated[
    int,
    typer.Option("--top-k", help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", help="Keep the smallest set of tokens of this probability.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Drop tokens less probable than this times the most probable one.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Lowers the logits of tokens in prompt and output; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Equal seeds give equal outputs. Default: a new one.", rich_help_panel=SAMPLING
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Profile written by `outpace tune`, whose drafter is used in place of --drafter.",
        rich_help_panel=MODEL,
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
Suites = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="LIST",
        help="builtin, rewriting, retrieval, spec_bench, mt_bench, humaneval, gsm8k, speed_bench, "
        "file:PATH (a .jsonl of prompts, turns or token ids).",
        rich_help_panel=DATA,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="OUTPACEDATA",
        help="Folder with public sets. Default: fetch them from the hub.",
        rich_help_panel=DATA,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", help="Maximum number of prompts per suite.", min=1, rich_help_panel=DATA),
]
Ends = Annotated[
    bool,
    typer.Option(
        "--eos",
        help="End answers at the model's end tokens; by default all have the same length.",
        rich_help_panel=SAMPLING,
    ),
]
JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write results as JSON; - is standard output, and tables then go to standard error.",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a report with plots.", rich_help_panel=OUTPUT),
]
TrainingData = Annotated[
    str,
    typer.Option(
        "--data",
        help="A .jsonl file, a folder of them, or hub:name=openai/gsm8k,config=main,split=train.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
ChatPrompts = Annotated[
    bool, typer.Option("--chat", help="Put prompts into the chat template.", rich_help_panel=DATA)
]
