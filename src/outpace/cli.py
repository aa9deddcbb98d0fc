"""The command line. Thin: it parses, calls ``outpace.console`` and says how it went.

Exit codes: 0 all well; 1 outputs that should be equal are not; 2 a mistake in what was asked for; 130 Ctrl-C.
torch and transformers are imported inside the commands only, so that ``--help`` is quick.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from outpace import __version__
from outpace.console import options as o
from outpace.console import prompts, screen
from outpace.console.writer import Writer, check_out
from outpace.core import OutpaceError, SamplingParams

if TYPE_CHECKING:
    from outpace.console.models import Loaded
    from outpace.engine import Engine

P = ParamSpec("P")

DEFAULT_DRAFTER = "lookahead"
DEMO_DRAFTER = "lookahead:window=4,ngram=4,guesses=4"  # on a CPU a wide forward costs more
NOT_EQUAL, MISTAKE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="outpace",
    help="Faster decoding of Hugging Face language models, without changing one token of what they say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
datastores = typer.Typer(
    help="Datastores for the drafter [bold]retrieval[/bold]: build one, look at one.", no_args_is_help=True
)
app.add_typer(datastores, name="datastore")


def fail(message: str) -> None:
    """An error, on standard error."""
    screen.note(f"Error: {message}", style="bold red")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a user's mistake, Ctrl-C and a full device into a message and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OutpaceError as error:
            fail(str(error))
            raise typer.Exit(MISTAKE) from None
        except KeyboardInterrupt:
            screen.note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever read our output has had enough; typer ends quietly
        except OSError as error:
            fail(str(error))
            raise typer.Exit(MISTAKE) from None
        except (MemoryError, RuntimeError) as error:
            # torch.OutOfMemoryError is a RuntimeError; torch may not have been imported.
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            fail(
                "out of memory; a shorter prompt, a smaller --batch or --max-new-tokens, or --dtype bfloat16 "
                f"needs less ({str(error).splitlines()[0] if str(error) else 'no details'})"
            )
            raise typer.Exit(MISTAKE) from None

    return run


def sampling(**values: Any) -> SamplingParams:
    """SamplingParams of command line options; an error names the option as the user wrote it."""
    try:
        return SamplingParams(**values)
    except OutpaceError as error:
        name, _, rest = str(error).partition(" ")
        raise OutpaceError(f"--{name.replace('_', '-')} {rest}" if name in values else str(error)) from None


def parts(
    drafter: str,
    verifier: str,
    model: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    references: bool = False,
) -> Loaded:
    """The model asked for. What can be wrong with the drafter and the verifier is said before it loads."""
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.console.models import load
        from outpace.drafters import load_drafter
        from outpace.verify import load_verifier

        if references and not load_drafter(drafter).reads_references:
            raise OutpaceError(
                f"--drafter {drafter} reads no references; use --drafter reference, or leave them out"
            )
        load_drafter(drafter)
        load_verifier(verifier)
        return load(model, device, dtype, trust_remote_code)


def labelled(drafter: str, engine: Engine) -> str:
    """What an engine is called beside plain decoding: its drafter, and a verifier that changes the tokens."""
    return drafter if engine.verifier.invariant else f"{drafter}, {engine.verifier}"


# -- commands --------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: [bold]outpace demo --drafter lookahead:window=5,ngram=4[/bold]")
@guarded
def demo(
    drafter: o.DrafterSpec = "",
    prompt: o.Question = None,
    once: o.Once = False,
    model: o.ModelName = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
) -> None:
    """A race: plain and accelerated decoding of one question, side by side.

    Both get the same share of time. Ends with exit code 1 if their outputs are not equal, unless the verifier
    is one that does not promise it.
    """
    params = sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if prompt == "":
        raise OutpaceError("the prompt is empty; give --prompt TEXT, or leave it out for the demo's question")
    spec = drafter or DEMO_DRAFTER
    loaded = parts(spec, verifier, model, device, dtype, trust_remote_code)
    from outpace.console import race

    engines = (loaded.engine(), loaded.engine(spec, verifier, adaptive=adaptive))
    label = labelled(spec, engines[1])
    equal, whole = race.demo(loaded, engines, label, prompt or race.DEMO_PROMPT, params, once)
    finish(whole, equal)


@app.command(epilog='Example: [bold]outpace generate --prompt "The quick brown" --compare[/bold]')
@guarded
def generate(
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    reference: o.Reference = None,
    chat: o.InTemplate = False,
    batch: o.Batch = 1,
    model: o.ModelName = None,
    drafter: o.DrafterSpec = DEFAULT_DRAFTER,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    online: o.OnlineLearning = False,
    online_out: o.OnlineOut = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None,
    as_json: o.AsJson = False,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    compare: o.Compare = False,
    repeats: o.Repeats = 3,
) -> None:
    """Decode a prompt from --prompt, a file or standard input, or many from a JSONL file.

    Text streams to standard output, statistics go to standard error.
    With --compare, ends with exit code 1 if the outputs are not equal.
    """
    given = dict(locals()) | {"stop": stop or ()}
    check_together(compare, batch, logprobs, as_json, online)
    check_online_out(online, online_out)
    params = sampling(**{name: given[name] for name in SamplingParams.__dataclass_fields__ if name in given})
    found = prompts.read(prompt, file, reference or ())
    loading = (drafter, verifier, model, device, dtype, trust_remote_code)
    with contextlib.closing(Writer(out, as_json, overwrite)) as writer:
        loaded = parts(*loading, references=any(one.references for one in found))
        from outpace.console import generate as runner
        from outpace.console.online import learning
        from outpace.console.runs import prepare

        jobs = prepare(found, loaded, chat)
        with learning(loaded, drafter, online, online_out) as learner:
            engine = loaded.engine(drafter, verifier, min(batch, len(jobs)), adaptive, learner)
            if compare:
                label = labelled(drafter, engine)
                ended = runner.compare(loaded, engine, label, jobs, params, repeats, writer)
            elif prompts.is_list(file):
                ended = runner.generate_many(engine, jobs, params, batch, writer), True
            else:
                ended = runner.generate_one(engine, jobs[0], params, writer), True
    finish(*ended)


def check_together(compare: bool, batch: int, logprobs: int | None, as_json: bool, online: bool) -> None:
    """Refuse options of ``generate`` that do not go together."""
    if compare and online:
        raise OutpaceError(
            "--compare decodes each prompt several times, and a drafter that learns would know it by then; "
            "leave one of --compare and --online out"
        )
    if compare and batch > 1:
        raise OutpaceError("--compare measures one prompt at a time; leave --batch out")
    if compare and logprobs is not None:
        raise OutpaceError("--compare reports no --logprobs; leave one of them out")
    if logprobs is not None and not as_json:
        raise OutpaceError("--logprobs are reported in JSON only; add --json")


def check_online_out(online: bool, out: Path | None) -> None:
    """Refuse a folder without anything to write, or with something in it."""
    if out is None:
        return
    if not online:
        raise OutpaceError("--online-out is where the drafter goes that --online has taught; add --online")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutpaceError(f"--online-out {out} is there already; give another folder")


def finish(whole: bool, equal: bool = True) -> None:
    """The exit code of a command that ran."""
    if not whole:
        screen.note("interrupted")
        raise typer.Exit(INTERRUPTED)
    if not equal:
        raise typer.Exit(NOT_EQUAL)


@app.command(epilog="Example: [bold]outpace chat --model HuggingFaceTB/SmolLM2-135M-Instruct[/bold]")
@guarded
def chat(
    model: o.ModelName = None,
    drafter: o.DrafterSpec = DEFAULT_DRAFTER,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    online: o.OnlineLearning = False,
    online_out: o.OnlineOut = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
) -> None:
    """Talk with a model, in its chat template where it has one.

    /exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer.
    """
    check_online_out(online, online_out)
    params = sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    loaded = parts(drafter, verifier, model, device, dtype, trust_remote_code)
    from outpace.console.chat import Chat, talk
    from outpace.console.online import learning

    with learning(loaded, drafter, online, online_out) as learner:
        engine = loaded.engine(drafter, verifier, adaptive=adaptive, online=learner)
        talk(Chat(loaded, engine, params))


@app.command(epilog="Example: [bold]outpace drafters --json[/bold]")
@guarded
def drafters(as_json: o.AsJson = False) -> None:
    """The drafting methods, their options and defaults, and their papers."""
    from outpace.console import catalogue

    if as_json:
        typer.echo(json.dumps(catalogue.catalogue(), indent=2))
    else:
        screen.out().print(catalogue.table())


@app.command(
    "train",
    epilog="Example: [bold]outpace train medusa:heads=4 --data prompts.jsonl --distil --out heads[/bold]",
)
@guarded
def train_drafter(
    method: o.Method,
    data: o.TrainingData,
    out: o.DrafterOut,
    model: o.ModelName = None,
    draft: o.DraftToTrain = None,
    objective: o.ObjectiveName = "ground_truth",
    tune: o.Tune = "",
    on_policy: o.OnPolicy = 0.0,
    boost_after: o.BoostAfter = None,
    distil: o.Distil = False,
    chat: o.ChatPrompts = False,
    steps: o.Steps = 1000,
    rows: o.BatchRows = 4,
    length: o.RowLength = 512,
    accumulate: o.Accumulate = 1,
    learning_rate: o.LearningRate = 1e-3,
    evaluate_every: o.EvaluateEvery = 100,
    patience: o.Patience = 0,
    held_out: o.HeldOut = 0.05,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    seed: o.TrainingSeed = 0,
    bf16: o.Bf16 = False,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Train a drafter for a model: `blockwise`, `dflash`, `draft_model`, `eagle`,
    `early_exit`, `hydra`, `medusa`, `parallel_tokens`, `spec_drafter`.

    The data are .jsonl files of texts, prompts with or without answers, or
    chats. Prompts without an answer are answered by the model itself; with
    --distil all of them are. A run that was interrupted goes on where the same
    command is given again. The drafter is then `METHOD:path=OUT`; a draft model
    is `draft_model:model=OUT`. With --tune lora the model learns too, and
    decodes as --model OUT/target.
    """
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.console import train
        from outpace.console.models import load
        from outpace.train.loop import Training

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
        loaded = load(model, device, dtype, trust_remote_code)
    corpus = train.Corpus(data, chat, distil, max_new_tokens, temperature, length, held_out)
    earlier = [folder.strip() for folder in (boost_after or "").split(",") if folder.strip()]
    found = train.run(method, loaded, corpus, settings, out, draft, earlier, tune)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        screen.out().print(train.table(found))


@app.command(
    epilog="Example: [bold]outpace search --data prompts.jsonl --trials 100 --out layers.json[/bold]"
)
@guarded
def search(
    data: o.TrainingData,
    out: o.LayersOut = None,
    overwrite: o.Overwrite = False,
    model: o.ModelName = None,
    trials: o.Trials = 100,
    num_draft_tokens: o.DraftTokens = 4,
    measure: o.MeasureName = "counts",
    prompts: o.PromptCount = 16,
    chat: o.ChatPrompts = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: o.SearchSeed = 0,
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
        from outpace.console import search as runner
        from outpace.console.models import load
        from outpace.console.train import table

        settings = runner.Search(trials, num_draft_tokens, measure, prompts, seed)
        loaded = load(model, device, dtype, trust_remote_code)
    found, whole = runner.run(loaded, data, chat, params, settings, out)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        screen.out().print(table(found))
    finish(whole)


@datastores.command(
    "build", epilog="Example: [bold]outpace datastore build texts/ --out texts.datastore[/bold]"
)
@guarded
def build_datastore(
    sources: o.Sources,
    out: o.DatastoreOut,
    model: o.TokenizerName = None,
    vocabulary: o.VocabularySize = None,
    field: o.Field = "text",
    end_token: o.EndToken = None,
    memory: o.SortingMemory = 2.0,
    trust_remote_code: o.Trust = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
) -> None:
    """A datastore for the drafter `retrieval`, of texts or of token ids.

    A file is one document, a .jsonl file has one in each line: a text, a list
    of token ids, or an object with either. A .npy file of token ids is one, or
    has one in each row. Of a folder, every file that holds text is read.
    Ctrl-C leaves nothing behind.
    """
    if model is not None and vocabulary is not None:
        raise OutpaceError("give --model or --vocabulary, not both")
    from outpace.console import datastore

    check_out(out, overwrite)
    found = datastore.sources(sources, field, end_token)
    if vocabulary is not None:
        words = datastore.Vocabulary(vocabulary)
    else:
        with screen.busy(f"loading the tokenizer of {model or 'the embedded model'} ..."):
            words = datastore.vocabulary_of(model, trust_remote_code)
    built = datastore.build(found, words, out, int(memory * 2**30))
    show(built, as_json)


@datastores.command("info", epilog="Example: [bold]outpace datastore info texts.datastore --verify[/bold]")
@guarded
def datastore_info(file: o.DatastoreFile, verify: o.VerifyAll = False, as_json: o.AsJson = False) -> None:
    """What a datastore holds."""
    from outpace.console import datastore

    show(datastore.describe(file, verify), as_json)


def show(found: dict[str, Any], as_json: bool) -> None:
    """What a command on datastores found, on standard output."""
    from outpace.console import datastore

    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        screen.out().print(datastore.table(found))


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A model may say what the terminal's encoding lacks.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
