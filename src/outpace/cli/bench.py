"""``outpace bench``: a table of methods for a user's model, hardware and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import benchmarks, finish, guarded
from outpace.cli.given import LoadingOptions, ModelOptions, StepOptions, taking
from outpace.cli.parts import ModelSource, check_length, check_listed, numbers, profiled, sampling
from outpace.cli.place import spread_of
from outpace.cli.writer import check_json
from outpace.core import DEFAULT_DRAFTER, OutpaceError
from outpace.names import is_gguf

if TYPE_CHECKING:
    from outpace.cli.bench_run import BenchPlan
    from outpace.loading import Loaded

TRANSFORMERS = "transformers:plain,transformers:prompt_lookup"

ProfileToo = Annotated[
    Path | None,
    o.model_option(
        "--profile", metavar="FILE", help="Also measure the drafter of an `outpace tune` profile."
    ),
]
Drafters = Annotated[
    str,
    o.drafter_option(
        "--drafters",
        metavar="LIST",
        rich_help_panel="Methods",
        help="Drafters and their options; none, plain decoding, is always measured.",
    ),
]
Peers = Annotated[
    str,
    o.method_option(
        "--peers",
        metavar="LIST",
        help="transformers (plain, prompt_lookup, assisted), one method as in transformers:plain; those of "
        "other packages, with an environment as in vllm=VENV; or none.",
        show_default=f"{TRANSFORMERS}; none of a .gguf file",
    ),
]
Assistant = Annotated[
    str | None,
    o.method_option(
        "--assistant",
        metavar="MODEL",
        help="Draft model of transformers:assisted. Default: the embedded one, for the embedded model.",
    ),
]
Batches = Annotated[str, o.method_option("--batch", metavar="LIST", help="Prompts decoded together.")]
BenchRepeats = Annotated[
    int, o.method_option("--repeats", metavar="N", help="Runs of each method, after a warm-up.", min=1)
]
Lengths = Annotated[
    str | None,
    o.method_option(
        "--lengths",
        metavar="LIST",
        help="Draft lengths K: every drafter with num_speculative_tokens, once with each; ungoverned.",
    ),
]
BenchSeed = Annotated[
    int,
    o.sampling_option("--seed", metavar="N", help="Seed of the first prompt and of the order of methods."),
]


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What is measured on which prompts."""

    suite: o.Suites = "builtin"
    data: o.Data = None
    limit: o.Limit = None
    drafters: Drafters = f"none,{DEFAULT_DRAFTER},lookahead,prompt_lookup"
    lengths: Lengths = None
    profile: ProfileToo = None
    verifier: o.VerifierName = "match"
    adaptive: o.Adaptive = None
    peers: Peers = ""
    assistant: Assistant = None
    batch: Batches = "1"
    repeats: BenchRepeats = 1


@dataclass(frozen=True, kw_only=True)
class BenchOptions(MethodOptions, ModelOptions, LoadingOptions, StepOptions):
    """The options of ``outpace bench``."""

    device_map: o.DeviceMap = None
    max_new_tokens: o.MaxNewTokens = 64
    temperature: o.Temperature = 0.0
    top_p: o.TopP = 1.0
    seed: BenchSeed = 0
    eos: o.Ends = False
    json_to: o.JsonTo = None

    def check(self) -> None:
        """Refuse invalid options, before torch is imported.

        Raises:
            OutpaceError: the message names the option.
        """
        sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )
        check_length(self.max_new_tokens)
        check_json(self.json_to)
        check_listed(self.suite, self.drafters, self.peers)


@benchmarks.callback(
    invoke_without_command=True,
    epilog="Example: outpace bench --suite builtin --json result.json",
)
@guarded
@taking(BenchOptions)
def bench(context: typer.Context, given: BenchOptions) -> None:
    """Measure methods on suites of prompts: speed, steps, acceptance, equality.

    All methods take turns on the same prompts, with the same stopping rule.
    Ends with exit code 1 if a method fails or its tokens differ from plain decoding's.
    """
    if context.invoked_subcommand is not None:
        return refuse_given(context)
    given.check()
    place, step = spread_of(given.device, given.device_map), given.steps()
    source = given.source(given.model, place=place, seq2seq=True, options=step)
    source.check_names(verifier=given.verifier)
    batches = numbers("batch", given.batch)
    with screen.busy("reading the prompts ..."):
        from outpace.cli import bench_run as runner

        chosen = runner.plan(given, "none" if is_gguf(given.model or "") else TRANSFORMERS, batches)
    loaded, chosen = loaded_for(chosen, source, given)
    found = runner.run(chosen, loaded, given.json_to)
    finish(not found.interrupted, equal=found.equal)


def loaded_for(chosen: BenchPlan, source: ModelSource, given: BenchOptions) -> tuple[Loaded, BenchPlan]:
    """The model of a benchmark, and its plan with the drafter and the profile's remarks."""
    notes, drafter = list[str](), "" if given.profile else "none"
    loaded, found = profiled(
        source, drafter, given.profile, given.verifier, at_once=chosen.batches, remark=notes.append
    )
    return loaded, chosen.with_drafter(found.spec, notes)


def refuse_given(context: typer.Context) -> None:
    """Refuse options before a subcommand, which would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise OutpaceError(f"--{name.replace('_', '-')} does not go with {context.invoked_subcommand}")
