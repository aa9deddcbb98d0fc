"""The options that commands of several groups share. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL = "Model"
SAMPLING = "Sampling"
OUTPUT = "Output"

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Hub name or folder. Default: the embedded model.", rich_help_panel=MODEL
    ),
]
VerifierName = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="SPEC",
        help="match: the tokens of plain decoding; rejection, block: their distribution; lossy: typical, "
        "top_beta, bild, with options as in typical:epsilon=0.3.",
        rich_help_panel=MODEL,
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Let a governor decide, from measured times, how much each step drafts, or draft all that the "
        "drafter proposes. Default: govern where the verifier is match.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="As torch writes it. Default: cuda if there is.", rich_help_panel=MODEL),
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
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", help="Tokens to emit at most.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)
]
AsJson = Annotated[bool, typer.Option("--json", help="Results as JSON.", rich_help_panel=OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Let --out replace a file.", rich_help_panel=OUTPUT)
]
