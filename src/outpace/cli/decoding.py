"""Commands that decode: demo, generate, chat."""

from __future__ import annotations

import contextlib
from pathlib import Path

from outpace.cli import prompts
from outpace.cli.app import app, finish, guarded
from outpace.cli.options import decoding as own
from outpace.cli.options import shared as o
from outpace.cli.parts import labelled, profiled, sampling
from outpace.cli.writer import Writer
from outpace.core import OutpaceError, SamplingParams

DEMO_DRAFTER = "lookahead:window=4,ngram=4,guesses=4"  # on a CPU a wide forward costs more


@app.command(epilog="Example: [bold]outpace demo --drafter lookahead:window=5,ngram=4[/bold]")
@guarded
def demo(
    drafter: own.DrafterSpec = "",
    profile: own.ProfileFile = None,
    prompt: own.Question = None,
    once: own.Once = False,
    model: o.ModelName = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: own.Seed = 0,
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
    if profile is None:
        drafter = drafter or DEMO_DRAFTER
    loaded, spec = profiled(drafter, profile, verifier, model, device, dtype, trust_remote_code)
    from outpace.cli import demo as race
    from outpace.cli.online import engine_of

    engines = (loaded.engine(), engine_of(loaded, spec, verifier, 1, adaptive, None))
    label = labelled(spec, engines[1])
    equal, whole = race.demo(loaded, engines, label, prompt or race.DEMO_PROMPT, params, once)
    finish(whole, equal)


@app.command(epilog='Example: [bold]outpace generate --prompt "The quick brown" --compare[/bold]')
@guarded
def generate(
    prompt: own.Prompt = None,
    file: own.PromptFile = None,
    reference: own.Reference = None,
    chat: own.InTemplate = False,
    batch: own.Batch = 1,
    model: o.ModelName = None,
    drafter: own.DefaultDrafterSpec = "",
    profile: own.ProfileFile = None,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    online: own.OnlineLearning = False,
    online_options: own.OnlineOptions = "",
    online_out: own.OnlineOut = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: own.TopK = 0,
    top_p: own.TopP = 1.0,
    min_p: own.MinP = 0.0,
    repetition_penalty: own.RepetitionPenalty = 1.0,
    presence_penalty: own.PresencePenalty = 0.0,
    frequency_penalty: own.FrequencyPenalty = 0.0,
    seed: own.Seed = None,
    stop: own.Stop = None,
    ignore_eos: own.IgnoreEos = False,
    logprobs: own.Logprobs = None,
    as_json: o.AsJson = False,
    out: own.Out = None,
    overwrite: o.Overwrite = False,
    compare: own.Compare = False,
    repeats: own.Repeats = 3,
) -> None:
    """Decode a prompt from --prompt, a file or standard input, or many from a JSONL file.

    Text streams to standard output, statistics go to standard error.
    With --compare, ends with exit code 1 if the outputs are not equal.
    """
    given = dict(locals()) | {"stop": stop or ()}
    check_together(compare, batch, logprobs, as_json, online)
    check_online(online, online_options, online_out)
    params = sampling(**{name: given[name] for name in SamplingParams.__dataclass_fields__ if name in given})
    found = prompts.read(prompt, file, reference or ())
    copied, together = any(one.references for one in found), min(batch, len(found))
    loading = (drafter, profile, verifier, model, device, dtype, trust_remote_code)
    with contextlib.closing(Writer(out, as_json, overwrite)) as writer:
        loaded, spec = profiled(*loading, references=copied, at_once=(together,))
        from outpace.cli import generate as runner
        from outpace.cli.online import engine_of, learning
        from outpace.cli.running import prepare

        jobs = prepare(found, loaded, chat)
        with learning(loaded, spec, online, online_options, online_out) as learner:
            engine = engine_of(loaded, spec, verifier, together, adaptive, learner)
            if compare:
                label = labelled(spec, engine)
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


def check_online(online: bool, options: str, out: Path | None) -> None:
    """Refuse options of a learning that is not wanted, and a folder with something in it."""
    if options and not online:
        raise OutpaceError("--online-options say how --online learns; add --online")
    if out is None:
        return
    if not online:
        raise OutpaceError("--online-out is where the drafter goes that --online has taught; add --online")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutpaceError(f"--online-out {out} is there already; give another folder")


@app.command(epilog="Example: [bold]outpace chat --model HuggingFaceTB/SmolLM2-135M-Instruct[/bold]")
@guarded
def chat(
    model: o.ModelName = None,
    drafter: own.DefaultDrafterSpec = "",
    profile: own.ProfileFile = None,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    online: own.OnlineLearning = False,
    online_options: own.OnlineOptions = "",
    online_out: own.OnlineOut = None,
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: own.TopK = 0,
    top_p: own.TopP = 1.0,
    min_p: own.MinP = 0.0,
    repetition_penalty: own.RepetitionPenalty = 1.0,
    seed: own.Seed = None,
) -> None:
    """Talk with a model, in its chat template where it has one.

    /exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer.
    """
    check_online(online, online_options, online_out)
    params = sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    loaded, spec = profiled(drafter, profile, verifier, model, device, dtype, trust_remote_code)
    from outpace.cli.chat import Chat, talk
    from outpace.cli.online import engine_of, learning

    with learning(loaded, spec, online, online_options, online_out) as learner:
        engine = engine_of(loaded, spec, verifier, 1, adaptive, learner)
        talk(Chat(loaded, engine, params))
