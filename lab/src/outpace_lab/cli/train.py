"""``outpace train``: train a drafter for a user's own model and data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded, show
from outpace.names import check_names
from outpace.spec_text import plain
from outpace_lab.cli.options import ChatPrompts, TrainingData
from outpace_lab.names import OBJECTIVES, WAYS, check_data, check_known, method_of

_training = partial(typer.Option, rich_help_panel="Training")

Method = Annotated[
    str,
    typer.Argument(metavar="METHOD", help="Method and options, as in medusa:heads=4.", show_default=False),
]
DrafterOut = Annotated[
    Path, o.output_option("--out", "-o", metavar="PATH", help="The drafter's folder.", show_default=False)
]
ObjectiveName = Annotated[
    str,
    _training(
        "--objective",
        metavar="NAME",
        help="ground_truth, forward_kl, reverse_kl, jensen_shannon, total_variation.",
    ),
]
Tune = Annotated[
    str,
    _training(
        "--tune",
        metavar="SPEC",
        help="Train the model as well, as in lora:rank=8,alpha=16,warmup=0.25: its tokens change.",
    ),
]
OnPolicy = Annotated[
    float,
    _training(
        "--on-policy",
        metavar="SHARE",
        help="Share of forwards on a draft model's own answers, scored by the target.",
    ),
]
DraftToTrain = Annotated[
    str | None,
    _training(
        "--draft",
        metavar="MODEL",
        help="For draft_model: start from this folder or hub name. [default: from scratch]",
        show_default=False,
    ),
]
BoostAfter = Annotated[
    str | None,
    _training(
        "--boost-after",
        metavar="LIST",
        help="Comma-separated folders of trained drafters: learn what they get wrong.",
        show_default=False,
    ),
]
Distil = Annotated[bool, o.data_option("--distil", help="Replace all answers by the model's.")]
RowLength = Annotated[int, o.data_option("--length", metavar="N", help="Tokens of a packed row.", min=2)]
HeldOut = Annotated[
    float,
    o.data_option(
        "--held-out",
        metavar="SHARE",
        help="Share of documents held out for the reported figures; half as many more are for calibration.",
    ),
]
Steps = Annotated[int, _training("--steps", metavar="N", help="Updates of the weights.")]
BatchRows = Annotated[int, _training("--rows", metavar="N", help="Rows per forward.")]
Accumulate = Annotated[int, _training("--accumulate", metavar="N", help="Forwards per update.")]
LearningRate = Annotated[float, _training("--learning-rate", metavar="X", help="The peak learning rate.")]
EvaluateEvery = Annotated[
    int, _training("--evaluate-every", metavar="N", help="Steps between measurements and checkpoints.")
]
Patience = Annotated[
    int, _training("--patience", metavar="N", help="Stop after N measurements without a gain; 0 never stops.")
]
TrainingSeed = Annotated[
    int, _training("--seed", metavar="N", help="Seed of initial weights and the order of data.", min=0)
]
Bf16 = Annotated[bool, _training("--bf16", help="Forwards of the drafter in bfloat16.")]

KeptIn = Annotated[
    Path | None,
    o.data_option(
        "--states",
        metavar="DIR",
        help="Keep the model's hidden states in this folder: each row is then read once, for later runs too.",
        show_default=False,
    ),
]


@app.command(
    "train",
    epilog="Example: outpace train medusa:heads=4 --data prompts.jsonl --distil --out heads",
)
@guarded
def train_drafter(
    method: Method,
    data: TrainingData,
    out: DrafterOut,
    model: o.ModelName = None,
    draft: DraftToTrain = None,
    objective: ObjectiveName = "ground_truth",
    tune: Tune = "",
    on_policy: OnPolicy = 0.0,
    boost_after: BoostAfter = None,
    distil: Distil = False,
    chat: ChatPrompts = False,
    steps: Steps = 1000,
    rows: BatchRows = 4,
    length: RowLength = 512,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 1e-3,
    evaluate_every: EvaluateEvery = 100,
    patience: Patience = 0,
    held_out: HeldOut = 0.05,
    states: KeptIn = None,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    seed: TrainingSeed = 0,
    bf16: Bf16 = False,
    device: o.Device = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Train a drafter for a model: `blockwise`, `dflash`, `draft_model`, `eagle`,
    `early_exit`, `hydra`, `medusa`, `mtp`, `parallel_tokens`, `spec_drafter`.

    The data are .jsonl files of texts, prompts with or without answers, or
    chats. Prompts without an answer are answered by the model itself, with
    --distil all prompts are. Reported figures are measured on the model's own
    text after held-out prompts. To resume an interrupted run, repeat the
    command. Use the result as `METHOD:path=OUT`; a draft model as
    `draft_model:model=OUT`. With --tune lora the model is trained too; use it
    as --model OUT/target.
    """
    check_names(model, dtype, device)
    method_of(plain(method))
    check_known("objective", objective, OBJECTIVES)
    if tune:
        check_known("way to train a model", plain(tune).partition(":")[0].strip(), WAYS)
    check_data(data)
    with screen.of_the_first():
        with screen.busy(f"loading {model or 'the embedded model'} ..."):
            from outpace.loading import load
            from outpace.loading.placement import device_of
            from outpace_lab.cli import train_run as train
            from outpace_lab.cli import train_texts as texts
            from outpace_lab.train.loop import Training
            from outpace_lab.train.processes import own_device

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
            train.options_of(method, draft)
            if tune:
                train.way_of(tune)
            place = own_device(device)
            # Weights are trained, and states kept, in float32 on a CPU.
            dtype = "float32" if dtype == "auto" and device_of(place).type == "cpu" else dtype
            loaded = load(model, dtype, place, trust_remote_code=trust_remote_code, seq2seq=True)
        corpus = texts.Corpus(data, chat, distil, max_new_tokens, temperature, length, held_out)
        earlier = [folder.strip() for folder in (boost_after or "").split(",") if folder.strip()]
        try:
            found = train.run(method, loaded, corpus, settings, out, draft, earlier, tune, states)
        except KeyboardInterrupt:
            screen.note("repeat the command to resume from the last checkpoint and the answers so far")
            raise
        show(found, as_json, train.table)
