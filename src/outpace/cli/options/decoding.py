"""The options of the commands that decode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options.shared import MODEL, OUTPUT, SAMPLING

_SPEC = (
    "A drafter and its options, as in lookahead:window=7,ngram=5; drafters of drafters in parentheses, as in "
    "combined:(lookahead)+(prompt_lookup); see `outpace drafters`."
)

DrafterSpec = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        metavar="SPEC",
        help=_SPEC,
        rich_help_panel=MODEL,
    ),
]
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
        help="Let the drafter learn in the background from what it gets wrong, where it has trained weights: "
        "draft_model, or METHOD:path=FOLDER. No token changes.",
        rich_help_panel=MODEL,
    ),
]
OnlineOptions = Annotated[
    str,
    typer.Option(
        "--online-options",
        metavar="OPTIONS",
        help="With --online: how it learns, as in every=512,learning_rate=3e-5.",
        rich_help_panel=MODEL,
    ),
]
OnlineOut = Annotated[
    Path | None,
    typer.Option(
        "--online-out",
        help="With --online: a new folder for the drafter at the end.",
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
        "--top-p", help="Keep the smallest set of tokens with this probability.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Drop tokens less probable than this times the best one.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Over prompt and output; 1 is off.", rich_help_panel=SAMPLING),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Off each token seen in the output.", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Off a token for each time it is in the output.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same output. Default: a new one.", rich_help_panel=SAMPLING),
]
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A text file, or a .jsonl of prompts: strings, or objects with prompt, question or turns.",
    ),
]
Reference = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        "-r",
        help="A text file that the output may repeat, for --drafter reference; repeatable. "
        "(In a .jsonl: a list of texts, references.)",
    ),
]
InTemplate = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
Batch = Annotated[int, typer.Option("--batch", help="Prompts decoded together.", min=1)]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the output; repeatable.", rich_help_panel=SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after an end token.", rich_help_panel=SAMPLING)
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="With --json: log probabilities of each token and of so many alternatives.",
        rich_help_panel=OUTPUT,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write results to this file.", rich_help_panel=OUTPUT)
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Decode plainly too, in turns: equality and both speeds.", rich_help_panel=OUTPUT
    ),
]
Repeats = Annotated[
    int,
    typer.Option("--repeats", help="With --compare: medians of so many runs.", min=1, rich_help_panel=OUTPUT),
]
Question = Annotated[str | None, typer.Option("--prompt", "-p", help="Decode this instead of the question.")]
Once = Annotated[
    bool, typer.Option("--once", help="Print the end only, for terminals that cannot be redrawn.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="What `outpace tune` wrote: its drafter, in place of --drafter.",
        rich_help_panel=MODEL,
    ),
]
