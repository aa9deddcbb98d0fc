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
    typer.Argument(metavar="METHOD", help="Method and options, as in medusa:heads=4.", show_default=False),
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
        help="Share of forwards on a draft model's own answers, scored by the target.",
        rich_help_panel=_TRAINING,
    ),
]
DraftToTrain = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="For draft_model: start from this folder or hub name. [default: from scratch]",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
BoostAfter = Annotated[
    str | None,
    typer.Option(
        "--boost-after",
        help="Comma-separated folders of trained drafters: learn what they get wrong.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Distil = Annotated[
    bool,
    typer.Option("--distil", help="Replace all answers by the model's.", rich_help_panel=o.DATA),
]
RowLength = Annotated[
    int,
    typer.Option("--length", help="Tokens of a packed row.", min=2, rich_help_panel=o.DATA),
]
HeldOut = Annotated[
    float,
    typer.Option(
        "--held-out",
        help="Share of documents held out for the reported figures; half as many more are for calibration.",
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
        "--seed", help="Seed of initial weights and the order of data.", min=0, rich_help_panel=_TRAINING
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
    chats. Prompts without an answer are answered by the model itself, with
    --distil all prompts are. Reported figures are measured on the model's own
    text after held-out prompts. To resume an interrupted run, repeat the
    command. Use the result as `METHOD:path=OUT`; a draft model as
    `draft_model:model=OUT`. With --tune lora the model is trained too; use it
    as --model OUT/target.
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
            screen.note("repeat the command to resume from the last checkpoint and the answers so far")
            raise
        show(found, as_json, train.table)
