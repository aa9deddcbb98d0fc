"""The options of the commands that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options.shared import OUTPUT

_TRAINING = "Training"
_DATA = "Data"
_SEARCH = "Search"

Method = Annotated[
    str,
    typer.Argument(metavar="METHOD", help="With its options, as in medusa:heads=4.", show_default=False),
]
TrainingData = Annotated[
    str,
    typer.Option(
        "--data",
        help="A .jsonl file, a folder of them, or hub:name=openai/gsm8k,config=main,split=train.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
DrafterOut = Annotated[
    Path,
    typer.Option("--out", "-o", help="The drafter's folder.", rich_help_panel=OUTPUT, show_default=False),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        help="ground_truth, forward_kl, reverse_kl, jensen_shannon, total_variation.",
        rich_help_panel=_TRAINING,
    ),
]
Tune = Annotated[
    str,
    typer.Option(
        "--tune",
        metavar="SPEC",
        help="Train the model as well, as in lora:rank=8,alpha=16,warmup=0.25: its tokens change.",
        rich_help_panel=_TRAINING,
    ),
]
OnPolicy = Annotated[
    float,
    typer.Option(
        "--on-policy",
        help="Share of forwards on a draft model's own answers to the prompts, scored by the model.",
        rich_help_panel=_TRAINING,
    ),
]
DraftToTrain = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="For draft_model: go on from this folder or name on the hub. [default: from scratch]",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
BoostAfter = Annotated[
    str | None,
    typer.Option(
        "--boost-after",
        help="Folders of trained drafters, between commas: learn what they get wrong.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Distil = Annotated[
    bool,
    typer.Option("--distil", help="Let the model answer all prompts anew.", rich_help_panel=_DATA),
]
ChatPrompts = Annotated[
    bool, typer.Option("--chat", help="Prompts are turns of a chat.", rich_help_panel=_DATA)
]
RowLength = Annotated[
    int,
    typer.Option("--length", help="Tokens of a packed row.", min=2, rich_help_panel=_DATA),
]
HeldOut = Annotated[
    float,
    typer.Option(
        "--held-out",
        help="Share of the documents to report on; half as many more are for calibration.",
        rich_help_panel=_DATA,
    ),
]
Steps = Annotated[int, typer.Option("--steps", help="Updates of the weights.", rich_help_panel=_TRAINING)]
BatchRows = Annotated[int, typer.Option("--rows", help="Rows to a forward.", rich_help_panel=_TRAINING)]
Accumulate = Annotated[
    int, typer.Option("--accumulate", help="Forwards to an update.", rich_help_panel=_TRAINING)
]
LearningRate = Annotated[
    float, typer.Option("--learning-rate", help="The greatest.", rich_help_panel=_TRAINING)
]
EvaluateEvery = Annotated[
    int,
    typer.Option(
        "--evaluate-every", help="Steps between measurements and checkpoints.", rich_help_panel=_TRAINING
    ),
]
Patience = Annotated[
    int,
    typer.Option(
        "--patience",
        help="Stop after so many measurements without a gain; 0: never.",
        rich_help_panel=_TRAINING,
    ),
]
TrainingSeed = Annotated[
    int, typer.Option("--seed", help="Of first weights and order.", min=0, rich_help_panel=_TRAINING)
]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="Forwards of the drafter in bfloat16.", rich_help_panel=_TRAINING)
]
LayersOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the layers to this .json file.", rich_help_panel=OUTPUT),
]
Trials = Annotated[int, typer.Option("--trials", help="Sets to try.", min=1, rich_help_panel=_SEARCH)]
DraftTokens = Annotated[
    int,
    typer.Option("--num-draft-tokens", help="Tokens in a draft.", min=1, rich_help_panel=_SEARCH),
]
MeasureName = Annotated[
    str,
    typer.Option(
        "--measure",
        help="counts: tokens for the layers that ran, the same in every run; seconds: on this machine.",
        rich_help_panel=_SEARCH,
    ),
]
PromptCount = Annotated[
    int, typer.Option("--prompts", help="Prompts of the data at most.", min=1, rich_help_panel=_DATA)
]
SearchSeed = Annotated[
    int, typer.Option("--seed", help="Of the search, and of draws.", min=0, rich_help_panel=_SEARCH)
]
