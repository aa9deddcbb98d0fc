"""Options shared by several commands of the laboratory. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli import options as o

Html = Annotated[Path | None, o.output_option("--html", metavar="FILE", help="Write a report with plots.")]
Like = Annotated[
    str,
    o.model_option(
        "--like", metavar="SHAPE", help="Grow the model to this shape in memory; see `outpace grow`."
    ),
]
TrainingData = Annotated[
    str,
    o.data_option(
        "--data",
        metavar="DATA",
        help="A .jsonl file, a folder of them, or hub:name=openai/gsm8k,config=main,split=train.",
        show_default=False,
    ),
]
ChatPrompts = Annotated[bool, o.data_option("--chat", help="Put prompts into the chat template.")]
