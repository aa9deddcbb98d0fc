"""``outpace search``: the best layers for ``self_speculative`` to skip, on a user's own prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from outpace.cli import options as o
from outpace.cli import progress, screen
from outpace.cli.app import app, finish, guarded, show
from outpace.cli.interrupt import Interrupt
from outpace.cli.parts import sampling
from outpace.cli.writer import check_out
from outpace.core import OutpaceError, SamplingParams

if TYPE_CHECKING:
    from outpace.loading import Loaded
    from outpace.train.skipping import SkippedLayers

_SEARCH = "Search"

LayersOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the layers to this .json file.", rich_help_panel=o.OUTPUT),
]
Trials = Annotated[
    int, typer.Option("--trials", help="Sets of layers to try.", min=1, rich_help_panel=_SEARCH)
]
DraftTokens = Annotated[
    int,
    typer.Option("--num-draft-tokens", help="Tokens per draft.", min=1, rich_help_panel=_SEARCH),
]
MeasureName = Annotated[
    str,
    typer.Option(
        "--measure",
        help="counts: tokens per layers run, reproducible; seconds: measured on this machine.",
        rich_help_panel=_SEARCH,
    ),
]
PromptCount = Annotated[
    int, typer.Option("--prompts", help="Maximum number of prompts.", min=1, rich_help_panel=o.DATA)
]
SearchSeed = Annotated[
    int, typer.Option("--seed", help="Seed of the search and of sampling.", min=0, rich_help_panel=_SEARCH)
]


@app.command(
    epilog="Example: [bold]outpace search --data prompts.jsonl --trials 100 --out layers.json[/bold]"
)
@guarded
def search(
    data: o.TrainingData,
    out: LayersOut = None,
    overwrite: o.Overwrite = False,
    model: o.ModelName = None,
    trials: Trials = 100,
    num_speculative_tokens: DraftTokens = 4,
    measure: MeasureName = "counts",
    prompts: PromptCount = 16,
    chat: o.ChatPrompts = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: SearchSeed = 0,
    device: o.Device = None,
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
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.cli.train_run import table
        from outpace.loading import load

        settings = Search(trials, num_speculative_tokens, measure, prompts, seed)
        loaded = load(model, dtype, device, trust_remote_code=trust_remote_code)
    found, whole = run(loaded, data, chat, params, settings, out)
    show(found, as_json, table)
    finish(whole)


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of a search.

    Attributes:
        trials: sets of layers to try.
        num_speculative_tokens: tokens that ``self_speculative`` drafts.
        measure: the measure of a set, "counts" or "seconds".
        prompts: maximum number of prompts, the first of the data.
        seed: seed of the search.
    """

    trials: int
    num_speculative_tokens: int
    measure: str
    prompts: int
    seed: int

    def __post_init__(self) -> None:
        from outpace.train.skipping import Measure

        if self.measure not in get_args(Measure):
            raise OutpaceError(f"--measure must be counts or seconds, not {self.measure!r}")


def run(
    model: Loaded, source: str, chat: bool, params: SamplingParams, search: Search, out: Path | None
) -> tuple[dict[str, Any], bool]:
    """Search; return the best result so far, and whether the search ran to its end.

    Raises:
        KeyboardInterrupt: interrupted before anything was found.
    """
    from outpace.train.skipping import Measure, find_skipped_layers

    prompts = _prompts(model, source, chat, search.prompts)
    best: SkippedLayers | None = None
    with Interrupt() as interrupt, progress.bar(search.trials, "trials") as bar:

        def report(number: int, found: SkippedLayers | None) -> None:
            nonlocal best
            best = found
            bar.advance("" if found is None else f"best so far: skip {_spelled(found)}")

        try:
            best = find_skipped_layers(
                model.target,
                prompts,
                params,
                num_speculative_tokens=search.num_speculative_tokens,
                trials=search.trials,
                measure=cast(Measure, search.measure),
                seed=search.seed,
                report=report,
                stop=lambda: interrupt.raised,
            )
        except OutpaceError:
            if interrupt.raised and best is None:
                raise KeyboardInterrupt from None
            raise
    if out is not None:
        best.save(out)
    skip = str(out) if out is not None else _spelled(best)
    drafter = f"self_speculative:skip={skip},num_speculative_tokens={search.num_speculative_tokens}"
    found = {**dataclasses.asdict(best), "prompts": len(prompts), "drafter": drafter}
    return found, not interrupt.raised


def _spelled(found: SkippedLayers) -> str:
    return "+".join(map(str, found.skip))


def _prompts(model: Loaded, source: str, chat: bool, most: int) -> Seq[Seq[int]]:
    """The first prompts of the data that leave room for an answer; a text without a prompt is one."""
    from outpace.train import data, hub

    read = hub.read if source.startswith(hub.PREFIX) else data.read
    documents = read(source, model, chat)
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
