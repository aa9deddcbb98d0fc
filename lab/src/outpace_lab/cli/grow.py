"""``outpace grow``: a model with the tokens of a small one and the cost of a larger shape."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outpace.cli import options as o
from outpace.cli import progress
from outpace.cli.app import app, guarded, show
from outpace.core import DTYPES
from outpace.names import check_model
from outpace_lab.bench.llama_shapes import load_shape
from outpace_lab.names import check_known

ShapeName = Annotated[
    str,
    typer.Option(
        "--like",
        metavar="SHAPE",
        help="llama-0.1b, llama-0.5b, llama-1b, llama-7b, llama-13b, llama-34b, llama-70b.",
        show_default=False,
    ),
]
ModelOut = Annotated[
    Path, o.output_option("--out", "-o", metavar="PATH", help="The model's folder.", show_default=False)
]
GrownDtype = Annotated[
    str,
    o.model_option(
        "--dtype",
        metavar="DTYPE",
        help="float32 keeps every token; in bfloat16 and float16 near-ties may flip. Or float64.",
    ),
]
NoiseSeed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of noise that no output depends on.", min=0)
]


@app.command("grow", epilog="Example: outpace grow --like llama-0.1b --out nano-0.1b")
@guarded
def grow_model(
    like: ShapeName,
    out: ModelOut,
    model: o.ModelName = None,
    dtype: GrownDtype = "float32",
    seed: NoiseSeed = 0,
    trust_remote_code: o.Trust = False,
    as_json: o.AsJson = False,
) -> None:
    """Grow a model: the tokens of a small one with the cost of a larger Llama shape.

    For benchmarks: it has the steps and tokens of the small model and the step
    times of the large one. Ctrl-C leaves nothing behind.
    """
    shape = load_shape(like)
    check_known("dtype", dtype, DTYPES)
    check_model(model)
    import torch

    from outpace.loading.weights import load_weights
    from outpace_lab.bench.growth import Growth, vocabulary_note
    from outpace_lab.bench.growth_folder import check_folder, save

    began = time.perf_counter()
    check_folder(out)
    name, source, tokenizer = load_weights(model, "auto", trust_remote_code)
    growth = Growth(source, shape, getattr(torch, dtype), seed)
    found = {
        "model": name,
        "like": like,
        "shape": asdict(shape),
        "parameters": growth.parameters,
        "model_parameters": sum(weight.numel() for weight in source.parameters()),
        "bytes": growth.parameters * growth.dtype.itemsize,
        "dtype": dtype,
        "vocabulary": growth.config.vocab_size,
        "vocabulary_note": vocabulary_note(growth.config, growth.dtype.itemsize),
        "context": growth.config.max_position_embeddings,
        "seed": seed,
    }
    with progress.bar(len(growth.names), "tensors") as bar:
        shards = save(growth, tokenizer, out, found, report=bar.advance)
    more = {"shards": shards, "seconds": time.perf_counter() - began, "out": str(out)}
    show({**found, **more}, as_json, table)


def table(found: dict[str, Any]) -> Table:
    """The description as a table."""
    made = Table(show_header=False, box=None)
    sizes = ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in found["shape"].items())
    grown, own = found["parameters"], found["model_parameters"]
    made.add_row("model", f"{found['model']}, {own:,} parameters")
    made.add_row("like", f"{found['like']}: {sizes}")
    made.add_row("parameters", f"{grown:,}, {found['bytes'] / 1e9:.2f} GB in {found['dtype']}")
    made.add_row("vocabulary", f"{found['vocabulary']}: {found['vocabulary_note']}")
    made.add_row("context", str(found["context"]))
    made.add_row("written", f"{found['out']}, {found['shards']} file" + "s" * (found["shards"] > 1))
    return made
