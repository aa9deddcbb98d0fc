"""``outpace gguf``: a Llama model as a GGUF file, which llama.cpp runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded
from outpace.cli.writer import check_out
from outpace.core import need
from outpace.names import check_model
from outpace_lab.names import GGUF_DTYPES, check_known

GgufOut = Annotated[
    Path, o.output_option("--out", "-o", metavar="PATH", help="The GGUF file.", show_default=False)
]
GgufDtype = Annotated[
    str,
    o.model_option(
        "--dtype", metavar="DTYPE", help="Of the matrices: float32, float16, bfloat16, q8_0 or q4_0."
    ),
]


@app.command("gguf", epilog="Example: outpace gguf --out nano.gguf")
@guarded
def write_model(
    out: GgufOut,
    model: o.ModelName = None,
    dtype: GgufDtype = "q8_0",
    trust_remote_code: o.Trust = False,
    overwrite: o.Overwrite = False,
) -> None:
    """Write a model of the family Llama as a GGUF file with its tokenizer.

    The commands run it by --model FILE, as in `outpace demo --model nano.gguf`.
    """
    check_out(out, overwrite)
    check_known("dtype", dtype, GGUF_DTYPES)
    check_model(model)
    need("gguf", "writing a GGUF file")
    with screen.busy(f"writing {out} ..."):
        import torch

        from outpace.loading.weights import load_weights
        from outpace.testing.gguf import write_gguf

        name, weights, tokenizer = load_weights(model, torch.float32, trust_remote_code)
        write_gguf(weights, out, dtype, tokenizer)
    screen.note(f"{name} in {dtype}: {out}")
