"""``outpace drift``: how far a lossy verifier moves the output of a model, and by how much it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outpace.cli import options as o
from outpace.cli import prompts
from outpace.cli.app import app, finish, guarded, show
from outpace.cli.comparing import compare, warm_up
from outpace.cli.interrupt import Interrupt
from outpace.cli.observing import engine_of
from outpace.cli.parts import ModelSource, profiled, sampling
from outpace.cli.progress import bar
from outpace.cli.running import Job, prepare
from outpace.core import SamplingParams

if TYPE_CHECKING:
    from outpace.loading import Loaded
    from outpace_lab.drift import Drift

DriftPrompt = Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")]
DriftFile = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="A text file, or a .jsonl of prompts, as for generate."
    ),
]
InTemplate = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]


@app.command(
    "drift",
    epilog="Example: outpace drift --verifier typical --prompt 'Once upon a time'",
)
@guarded
def drift_of(
    prompt: DriftPrompt = None,
    file: DriftFile = None,
    chat: InTemplate = False,
    model: o.ModelName = None,
    drafter: o.DefaultDrafterSpec = "",
    verifier: o.VerifierName = "typical",
    device: o.Device = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure how far a verifier moves the output: tokens changed, and their loss under the model.

    Each prompt is decoded plainly too, with the same seed.
    """
    params = sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    found = prompts.read(prompt, file)
    source = ModelSource(model, device, dtype, trust_remote_code, seq2seq=True)
    loaded, chosen = profiled(source, drafter, None, verifier)
    engine = engine_of(loaded, chosen.drafter, verifier, 1, None)
    drifts, whole = measure(loaded, (loaded.engine(), engine), prepare(found, loaded, chat), params)
    if drifts:
        show(as_dict(drifts, str(engine.verifier)), as_json, table)
    finish(whole)


def measure(
    loaded: Loaded, engines: Any, jobs: list[Job], params: SamplingParams
) -> tuple[list[tuple[Drift, float]], bool]:
    """Decode each prompt with both engines, plain decoding first.

    Returns:
        The drift of each prompt and the speed relative to plain decoding, and whether the run was complete.
    """
    from outpace_lab.drift import measure_drift

    found = []
    with Interrupt() as interrupt, bar(len(jobs), "prompts") as progress:
        warm_up(engines, jobs[0], params, interrupt)
        for job in jobs:
            one = compare(loaded, engines, job, params, 1, interrupt)
            if one is not None:
                prompt, source = job.parts(loaded.target)
                tokens = (one.plain.answer.tokens, one.other.answer.tokens)
                found.append((measure_drift(loaded.target, prompt, *tokens, source), one.ratio))
            if interrupt.raised:
                break
            progress.advance("")
    return found, not interrupt.raised


def as_dict(found: list[tuple[Drift, float]], verifier: str) -> dict[str, Any]:
    """Raw counts and common ratios of all prompts together."""
    from outpace_lab.drift import Drift

    drift = sum((one for one, _ in found), Drift())
    return {
        "verifier": verifier,
        "prompts": len(found),
        **vars(drift),
        "share_changed": drift.share_changed,
        "plain_loss": drift.plain_loss,
        "loss": drift.loss,
        "speed_ratios": [ratio for _, ratio in found],
    }


def table(found: dict[str, Any]) -> Table:
    """Table of sums over the prompts."""
    made = Table("", "plain", found["verifier"])
    made.add_row("prompts", str(found["prompts"]), str(found["prompts"]))
    made.add_row("tokens", str(found["plain_tokens"]), str(found["tokens"]))
    made.add_row("tokens changed", "", f"{found['share_changed']:.1%}")
    made.add_row("loss (nats per token)", f"{found['plain_loss']:.3f}", f"{found['loss']:.3f}")
    return made
