"""``outpace train``: train a drafter for a user's own model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded, show

_TRAINING = "Training"

Method = Annotated[
    str,
    typer.Argument(metavar="METHOD", help="With its options, as in medusa:heads=4.", show_default=False),
]
DrafterOut = Annotated[
    Path,
    typer.Option("--out", "-o", help="The drafter's folder.", rich_help_panel=o.OUTPUT, show_default=False),
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
    typer.Option("--distil", help="Let the model answer all prompts anew.", rich_help_panel=o.DATA),
]
RowLength = Annotated[
    int,
    typer.Option("--length", help="Tokens of a packed row.", min=2, rich_help_panel=o.DATA),
]
HeldOut = Annotated[
    float,
    typer.Option(
        "--held-out",
        help="Share of the documents to report on; half as many more are for calibration.",
        rich_help_panel=o.DATA,
    ),
]
Steps = Annotated[int, typer.Option("--steps", help="Updates of the weights.", rich_help_panel=_TRAINING)]
BatchRows = Annotated[int, typer.Option("--rows", help="Rows per forward.", rich_help_panel=_TRAINING)]
Accumulate = Annotated[
    int, typer.Option("--accumulate", help="Forwards per update.", rich_help_panel=_TRAINING)
]
LearningRate = Annotated[
    float, typer.Option("--learning-rate", help="The peak learning rate.", rich_help_panel=_TRAINING)
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
        help="Stop after N measurements without a gain; 0 never stops.",
        rich_help_panel=_TRAINING,
    ),
]
TrainingSeed = Annotated[
    int,
    typer.Option(
        "--seed", help="For the first weights and the order of the data.", min=0, rich_help_panel=_TRAINING
    ),
]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="Forwards of the drafter in bfloat16.", rich_help_panel=_TRAINING)
]


@app.command(
    "train",
    epilog="Example: [bold]outpace train medusa:heads=4 --data prompts.jsonl --distil --out heads[/bold]",
)
@guarded
def train_drafter(
    method: Method,
    data: o.TrainingData,
    out: DrafterOut,
    model: o.ModelName = None,
    draft: DraftToTrain = None,
    objective: ObjectiveName = "ground_truth",
    tune: Tune = "",
    on_policy: OnPolicy = 0.0,
    boost_after: BoostAfter = None,
    distil: Distil = False,
    chat: o.ChatPrompts = False,
    steps: Steps = 1000,
    rows: BatchRows = 4,
    length: RowLength = 512,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 1e-3,
    evaluate_every: EvaluateEvery = 100,
    patience: Patience = 0,
    held_out: HeldOut = 0.05,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    seed: TrainingSeed = 0,
    bf16: Bf16 = False,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Train a drafter for a model: `blockwise`, `dflash`, `draft_model`, `eagle`,
    `early_exit`, `hydra`, `medusa`, `parallel_tokens`, `spec_drafter`.

    The data are .jsonl files of texts, prompts with or without answers, or
    chats. Prompts without an answer are answered by the model itself; with
    --distil all of them are. What is reported is of the model's own text after
    the prompts held out. A run that was interrupted goes on where the same
    command is given again. The drafter is then `METHOD:path=OUT`; a draft model
    is `draft_model:model=OUT`. With --tune lora the model learns too, and
    decodes as --model OUT/target.
    """
    with screen.of_the_first():
        with screen.busy(f"loading {model or 'the embedded model'} ..."):
            from outpace.cli import train_run as train
            from outpace.cli import train_texts as texts
            from outpace.loading import load
            from outpace.train.loop import Training
            from outpace.train.processes import own_device

            settings = Training(
                steps,
                rows,
                accumulate,
                learning_rate,
                objective=objective,
                bf16=bf16,
                evaluate_every=evaluate_every,
                patience=patience,
                seed=seed,
                on_policy=on_policy,
            )
            loaded = load(model, dtype, own_device(device), trust_remote_code=trust_remote_code)
        corpus = texts.Corpus(data, chat, distil, max_new_tokens, temperature, length, held_out)
        earlier = [folder.strip() for folder in (boost_after or "").split(",") if folder.strip()]
        try:
            found = train.run(method, loaded, corpus, settings, out, draft, earlier, tune)
        except KeyboardInterrupt:
            screen.note("the same command goes on from the last checkpoint, and with the answers so far")
            raise
        show(found, as_json, train.table)
