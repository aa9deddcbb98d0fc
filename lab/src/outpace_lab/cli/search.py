"""``outpace search``: the best layers for ``self_speculative`` to skip, on a user's own prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from outpace.cli import options as o
from outpace.cli import progress, screen
from outpace.cli.app import app, finish, guarded, show
from outpace.cli.interrupt import Interrupt
from outpace.cli.parts import ModelSource, sampling
from outpace.cli.writer import check_out
from outpace.core import OutpaceError
from outpace_lab.cli.options import ChatPrompts, TrainingData
from outpace_lab.names import MEASURES, Measure, check_data, check_known

if TYPE_CHECKING:
    from outpace.loading import Loaded
    from outpace_lab.train.skipping import SkippedLayers

_search = partial(typer.Option, rich_help_panel="Search")

LayersOut = Annotated[
    Path | None, o.output_option("--out", "-o", metavar="PATH", help="Write the layers to this .json file.")
]
Trials = Annotated[int, _search("--trials", metavar="N", help="Sets of layers to try.", min=1)]
DraftTokens = Annotated[int, _search("--num-draft-tokens", metavar="N", help="Tokens per draft.", min=1)]
MeasureName = Annotated[
    str,
    _search(
        "--measure",
        metavar="NAME",
        help="counts: tokens per layers run, reproducible; seconds: measured on this machine.",
    ),
]
PromptCount = Annotated[
    int, o.data_option("--prompts", metavar="N", help="Maximum number of prompts.", min=1)
]
SearchSeed = Annotated[int, _search("--seed", metavar="N", help="Seed of the search and of sampling.", min=0)]


@app.command(epilog="Example: outpace search --data prompts.jsonl --trials 100 --out layers.json")
@guarded
def search(
    data: TrainingData,
    out: LayersOut = None,
    overwrite: o.Overwrite = False,
    model: o.ModelName = None,
    trials: Trials = 100,
    num_speculative_tokens: DraftTokens = 4,
    measure: MeasureName = "counts",
    prompts: PromptCount = 16,
    chat: ChatPrompts = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: SearchSeed = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Search for the best layers for the drafter `self_speculative` to skip.

    Takes the same data as `outpace train`; the prompts are decoded once for
    each set of layers. Ctrl-C ends the search with the best set so far.
    """
    params = sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if out is not None:
        if out.suffix != ".json":
            raise OutpaceError(f"--out must end in .json, which distinguishes files from layers; not {out}")
        check_out(out, overwrite)
    check_known("measure", measure, MEASURES)
    source = ModelSource(model, device, dtype, trust_remote_code)
    source.check_names()
    check_data(data)
    with screen.busy("preparing ..."):
        from outpace_lab.cli.train_run import table
        from outpace_lab.train.skipping import find_skipped_layers
    loaded = source.load()
    given = _prompts(loaded, data, chat, prompts)
    with Interrupt() as interrupt, progress.bar(trials, "trials") as bar:

        def report(number: int, found: SkippedLayers | None) -> None:
            bar.advance("" if found is None else f"best so far: skip {_spelled(found)}")

        try:
            best = find_skipped_layers(
                loaded.target,
                given,
                params,
                num_speculative_tokens=num_speculative_tokens,
                trials=trials,
                measure=cast(Measure, measure),
                seed=seed,
                report=report,
                stop=lambda: interrupt.raised,
            )
        except OutpaceError:
            if interrupt.raised:  # before anything was found
                raise KeyboardInterrupt from None
            raise
    if out is not None:
        best.save(out)
    skip = str(out) if out is not None else _spelled(best)
    drafter = f"self_speculative:skip={skip},num_speculative_tokens={num_speculative_tokens}"
    show({**asdict(best), "prompts": len(given), "drafter": drafter}, as_json, table)
    finish(not interrupt.raised)


def _spelled(found: SkippedLayers) -> str:
    return "+".join(map(str, found.skip))


def _prompts(model: Loaded, source: str, chat: bool, most: int) -> Seq[Seq[int]]:
    """The first prompts of the data that leave room for an answer; a text without a prompt is one."""
    from outpace_lab.train import hub

    documents = hub.read(source, model, chat)
    given = [document.tokens[: document.prompt] or document.tokens for document in documents]
    context = model.target.context
    fits = [prompt for prompt in given if context is None or len(prompt) < context]
    if len(fits) < len(given):
        screen.note(
            f"left out, since they fill the model's context of {context}: {len(given) - len(fits)} prompts"
        )
    if not fits:
        raise OutpaceError(f"no prompt in {source} fits the model's context of {context}; give shorter ones")
    return fits[:most]
