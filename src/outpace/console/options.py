"""The options that commands share, and the long ones. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL, _SAMPLING, _OUTPUT = "Model", "Sampling", "Output"

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Hub name or folder. Default: the embedded model.", rich_help_panel=_MODEL
    ),
]
DrafterSpec = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        metavar="SPEC",
        help="A drafter and its options, as in lookahead:window=7,ngram=5; drafters of drafters in "
        "parentheses, as in combined:(lookahead)+(prompt_lookup); see `outpace drafters`.",
        rich_help_panel=_MODEL,
    ),
]
VerifierName = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="SPEC",
        help="match: the tokens of plain decoding; rejection, block: their distribution; lossy: typical, "
        "top_beta, bild, with options as in typical:epsilon=0.3.",
        rich_help_panel=_MODEL,
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Let a governor decide, from measured times, how much each step drafts. "
        "Default: where --drafter is a name without options and the verifier is match.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
OnlineLearning = Annotated[
    bool,
    typer.Option(
        "--online",
        help="Let the drafter learn in the background from what it gets wrong, where it has trained weights: "
        "draft_model, or METHOD:path=FOLDER. No token changes.",
        rich_help_panel=_MODEL,
    ),
]
OnlineOut = Annotated[
    Path | None,
    typer.Option("--online-out", help="With --online: a new folder for the drafter at the end."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="As torch writes it. Default: cuda if there is.", rich_help_panel=_MODEL),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (the model's own on a GPU, float32 on a CPU), float32, bfloat16, float16, float64.",
        rich_help_panel=_MODEL,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=_MODEL
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", help="Tokens to emit at most.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int,
    typer.Option("--top-k", help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", help="Keep the smallest set of tokens with this probability.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Drop tokens less probable than this times the best one.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Over prompt and output; 1 is off.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Off each token seen in the output.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Off a token for each time it is in the output.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same output. Default: a new one.", rich_help_panel=_SAMPLING),
]
AsJson = Annotated[bool, typer.Option("--json", help="Results as JSON.", rich_help_panel=_OUTPUT)]
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
    typer.Option("--stop", help="Text that ends the output; repeatable.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after an end token.", rich_help_panel=_SAMPLING)
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="With --json: log probabilities of each token and of so many alternatives.",
        rich_help_panel=_OUTPUT,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write results to this file.", rich_help_panel=_OUTPUT)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Let --out replace a file.", rich_help_panel=_OUTPUT)
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Decode plainly too, in turns: equality and both speeds.", rich_help_panel=_OUTPUT
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", help="With --compare: medians of so many runs.", min=1, rich_help_panel=_OUTPUT
    ),
]
Question = Annotated[str | None, typer.Option("--prompt", "-p", help="Decode this instead of the question.")]
Once = Annotated[
    bool, typer.Option("--once", help="Print the end only, for terminals that cannot be redrawn.")
]

Sources = Annotated[
    list[Path], typer.Argument(help="Files and folders of texts or of token ids.", show_default=False)
]
DatastoreOut = Annotated[
    Path,
    typer.Option("--out", "-o", help="The datastore's file.", rich_help_panel=_OUTPUT, show_default=False),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--tokenizer",
        "-m",
        help="Whose tokenizer: hub name or folder. Default: the embedded model's.",
        rich_help_panel=_MODEL,
    ),
]
VocabularySize = Annotated[
    int | None,
    typer.Option(
        "--vocabulary",
        help="Instead, where all sources are token ids: how many there are.",
        min=1,
        rich_help_panel=_MODEL,
    ),
]
Field = Annotated[str, typer.Option("--field", help="Where objects of a .jsonl file have their text.")]
EndToken = Annotated[
    int | None,
    typer.Option("--end-token", help="The token id that ends each document of a .npy file.", min=0),
]
SortingMemory = Annotated[
    float,
    typer.Option(
        "--memory",
        help="GB for sorting. Texts that need more are put in several shards, which makes look-ups slower.",
        min=0.001,
    ),
]
DatastoreFile = Annotated[Path, typer.Argument(help="The datastore's file.", show_default=False)]
VerifyAll = Annotated[
    bool, typer.Option("--verify", help="Read all of it, and compare it with its checksums.")
]

_TRAINING, _DATA = "Training", "Data"

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
    typer.Option("--out", "-o", help="The drafter's folder.", rich_help_panel=_OUTPUT, show_default=False),
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

_SEARCH = "Search"

LayersOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the layers to this .json file.", rich_help_panel=_OUTPUT),
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
