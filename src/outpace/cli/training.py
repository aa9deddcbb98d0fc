"""Commands that train: train, search."""

from __future__ import annotations

from outpace.cli import screen
from outpace.cli.app import app, finish, guarded, show
from outpace.cli.options import shared as o
from outpace.cli.options import training as own
from outpace.cli.parts import sampling
from outpace.cli.writer import check_out
from outpace.core import OutpaceError


@app.command(
    "train",
    epilog="Example: [bold]outpace train medusa:heads=4 --data prompts.jsonl --distil --out heads[/bold]",
)
@guarded
def train_drafter(
    method: own.Method,
    data: own.TrainingData,
    out: own.DrafterOut,
    model: o.ModelName = None,
    draft: own.DraftToTrain = None,
    objective: own.ObjectiveName = "ground_truth",
    tune: own.Tune = "",
    on_policy: own.OnPolicy = 0.0,
    boost_after: own.BoostAfter = None,
    distil: own.Distil = False,
    chat: own.ChatPrompts = False,
    steps: own.Steps = 1000,
    rows: own.BatchRows = 4,
    length: own.RowLength = 512,
    accumulate: own.Accumulate = 1,
    learning_rate: own.LearningRate = 1e-3,
    evaluate_every: own.EvaluateEvery = 100,
    patience: own.Patience = 0,
    held_out: own.HeldOut = 0.05,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    seed: own.TrainingSeed = 0,
    bf16: own.Bf16 = False,
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


@app.command(
    epilog="Example: [bold]outpace search --data prompts.jsonl --trials 100 --out layers.json[/bold]"
)
@guarded
def search(
    data: own.TrainingData,
    out: own.LayersOut = None,
    overwrite: o.Overwrite = False,
    model: o.ModelName = None,
    trials: own.Trials = 100,
    num_speculative_tokens: own.DraftTokens = 4,
    measure: own.MeasureName = "counts",
    prompts: own.PromptCount = 16,
    chat: own.ChatPrompts = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: own.SearchSeed = 0,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Search for the layers that the drafter `self_speculative` had best skip.

    The data are those of `outpace train`; their prompts are decoded once for
    each set of layers. Ctrl-C ends the search with the best set so far.
    """
    params = sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if out is not None:
        if out.suffix != ".json":
            raise OutpaceError(f"--out must end in .json, as layers are told from files by it; not {out}")
        check_out(out, overwrite)
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.cli import search as runner
        from outpace.cli.train_run import table
        from outpace.loading import load

        settings = runner.Search(trials, num_speculative_tokens, measure, prompts, seed)
        loaded = load(model, dtype, device, trust_remote_code=trust_remote_code)
    found, whole = runner.run(loaded, data, chat, params, settings, out)
    show(found, as_json, table)
    finish(whole)
