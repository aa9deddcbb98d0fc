"""Options shared by several commands. Imports no torch."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outpace import names
from outpace.cli import completing
from outpace.cli.layout import RARE
from outpace.core import DEFAULT_DRAFTER, dtype_name
from outpace.native.processors import MOST, VARIABLE

# An option in one of the panels of --help.
model_option = partial(typer.Option, rich_help_panel="Model")
rare_option = partial(typer.Option, rich_help_panel=RARE)
method_option = partial(typer.Option, rich_help_panel="Methods")
data_option = partial(typer.Option, rich_help_panel="Data")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")
output_option = partial(typer.Option, rich_help_panel="Output")
# One whose value names drafters.
drafter_option = partial(
    typer.Option,
    metavar="SPEC",
    autocompletion=completing.drafters,
    callback=completing.with_own_modules,
    rich_help_panel="Model",
)

ModelName = Annotated[
    str | None,
    model_option(
        "--model",
        "-m",
        metavar="MODEL",
        autocompletion=completing.models,
        help="Hub name or folder, smollm2 (see `outpace pull`), or a .gguf file or "
        "owner/name:QUANT. Default: the embedded model.",
    ),
]
VerifierName = Annotated[
    str,
    model_option(
        "--verifier",
        metavar="SPEC",
        help="match: the tokens of plain decoding; rejection: their "
        "distribution; outpace-lab has more, also lossy ones.",
    ),
]
Adaptive = Annotated[
    bool | None,
    model_option(
        "--adaptive/--no-adaptive",
        help="Let a governor decide, from measured times, how much each step drafts, or verify all that the "
        "drafter proposes. Default: a governor if the verifier is match.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    model_option("--device", metavar="DEVICE", help="In torch's notation. Default: cuda if available."),
]
DeviceMap = Annotated[
    str | None,
    rare_option(
        "--device-map",
        metavar="MAP",
        help="Divide the layers among devices: auto, balanced, sequential, or JSON from module to device.",
    ),
]
Parallel = Annotated[
    str | None,
    rare_option(
        "--parallel",
        metavar="MODE",
        help="Under torchrun: draft (each process has the model, and verifies a share of a draft) or tensor "
        "(each has a part of every layer).",
    ),
]
ParallelTimeout = Annotated[
    float,
    rare_option(
        "--parallel-timeout",
        metavar="SECONDS",
        help="With --parallel: seconds in which every process must answer.",
        min=1,
    ),
]
Dtype = Annotated[
    str,
    model_option(
        "--dtype",
        metavar="DTYPE",
        callback=dtype_name,
        help="auto (the model's own; on a CPU bfloat16 if that is the model's own and bit-exact, or else "
        "float32), float32, bfloat16 (bf16), float16 (fp16), float64.",
    ),
]
Trust = Annotated[bool, rare_option("--trust-remote-code", help="Run Python code that comes with the model.")]
Quantise = Annotated[
    str | None,
    rare_option(
        "--quantise",
        "--quantize",
        metavar="BITS",
        help="int8 or int4: round the weights; for --dtype bfloat16 on a CPU. Changes the tokens.",
    ),
]
Stock = Annotated[
    bool,
    rare_option(
        "--stock",
        help="Slower: steps run on transformers' own modules, and plain decoding has its tokens.",
    ),
]


def _use_threads(count: int | None) -> int | None:
    """Let functions in C, torch and llama.cpp use a number of threads; torch reads it when it is imported."""
    if count is not None:
        os.environ |= {VARIABLE: str(count), "OMP_NUM_THREADS": str(count)}
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None,
    rare_option(
        "--threads",
        metavar="N",
        min=1,
        max=MOST,
        callback=_use_threads,
        help="Threads of steps on a CPU (see `outpace env`).",
    ),
]
LlamaCpp = Annotated[
    str,
    rare_option(
        "--llamacpp",
        metavar="OPTIONS",
        help="With a .gguf file: options, as in threads=4,n_gpu_layers=-1,type_v=q8_0 (docs/guides/gguf.md).",
    ),
]
Backend = Annotated[
    names.Backend,
    rare_option(
        "--backend",
        metavar="BACKEND",
        help="What runs a .gguf file: native, outpace itself; llamacpp; auto, the first that reads it.",
    ),
]
MaxNewTokens = Annotated[
    int,
    sampling_option("--max-new-tokens", "--max-tokens", "-n", metavar="N", help="Maximum tokens to emit."),
]
Temperature = Annotated[float, sampling_option("--temperature", "-t", metavar="T", help="0 is greedy.")]
AsJson = Annotated[bool, output_option("--json", help="Results as JSON.")]
Overwrite = Annotated[bool, output_option("--overwrite", help="Let --out replace a file.")]
SPEC = (
    "A drafter and its options, as in lookahead:window=7,ngram=5; nested drafters in parentheses, as in "
    "combined:(lookahead)+(prompt_lookup); see `outpace drafters`."
)
DefaultDrafterSpec = Annotated[
    str,
    drafter_option(
        "--drafter",
        "-d",
        help=SPEC,
        show_default=f"{DEFAULT_DRAFTER}, with what the model brings, or self where that pays",
    ),
]
ObserverSpec = Annotated[
    str,
    rare_option(
        "--observer",
        metavar="SPEC",
        help="What follows the steps and may change the drafter while it is used, from an installed "
        "package, as in online:every=512,out=DIR of outpace-lab.",
    ),
]
TopK = Annotated[
    int, sampling_option("--top-k", metavar="K", help="Keep the k most probable tokens; 0 keeps all.")
]
TopP = Annotated[
    float,
    sampling_option("--top-p", metavar="P", help="Keep the smallest set of tokens of this probability."),
]
MinP = Annotated[
    float,
    sampling_option(
        "--min-p", metavar="P", help="Drop tokens less probable than this times the most probable one."
    ),
]
RepetitionPenalty = Annotated[
    float,
    sampling_option(
        "--repetition-penalty",
        metavar="X",
        help="Lowers the logits of tokens in prompt and output; 1 is off.",
    ),
]
Seed = Annotated[
    int | None,
    sampling_option("--seed", metavar="N", help="Equal seeds give equal outputs. Default: a new one."),
]
ProfileFile = Annotated[
    Path | None,
    model_option(
        "--profile",
        metavar="FILE",
        help="Profile written by `outpace tune`, whose drafter is used in place of --drafter.",
    ),
]
Suites = Annotated[
    str,
    data_option(
        "--suite",
        metavar="LIST",
        help="builtin, rewriting, retrieval, file:PATH (a .jsonl of prompts, turns or token ids), or one of "
        "an installed package, as gsm8k of outpace-lab.",
    ),
]
Data = Annotated[
    Path | None,
    data_option(
        "--data",
        metavar="DIR",
        help="Folder with the suites of an installed package. Default: their usual place.",
    ),
]
Limit = Annotated[
    int | None, data_option("--limit", metavar="N", help="Maximum number of prompts per suite.", min=1)
]
Ends = Annotated[
    bool,
    sampling_option(
        "--eos", help="End answers at the model's end tokens; by default all have the same length."
    ),
]
JsonTo = Annotated[
    str | None,
    output_option(
        "--json",
        metavar="FILE",
        help="Write results as JSON; - is standard output, and tables then go to standard error.",
    ),
]


# Those of a chat, whose defaults are the model's own.
own_option = partial(sampling_option, show_default="the model's own")
OwnTemperature = Annotated[float | None, own_option("--temperature", "-t", metavar="T", help="0 is greedy.")]
OwnTopK = Annotated[
    int | None, own_option("--top-k", metavar="K", help="Keep the k most probable tokens; 0 keeps all.")
]
OwnTopP = Annotated[
    float | None,
    own_option("--top-p", metavar="P", help="Keep the smallest set of tokens of this probability."),
]
OwnMinP = Annotated[
    float | None,
    own_option(
        "--min-p", metavar="P", help="Drop tokens less probable than this times the most probable one."
    ),
]
OwnRepetitionPenalty = Annotated[
    float | None,
    own_option(
        "--repetition-penalty",
        metavar="X",
        help="Lowers the logits of tokens in prompt and output; 1 is off.",
    ),
]
