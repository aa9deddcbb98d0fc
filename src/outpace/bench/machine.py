"""What a benchmark ran on, for the record."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch
import transformers

from outpace._version import __version__
from outpace.targets.hardware import processor


def machine(device: str) -> dict[str, object]:
    """The processor, the versions, and the commit of a checkout where this is one.

    Args:
        device: that of the model, as torch writes it. Its name is ``device`` in what is found; there is none
            for a processor, which has been named already.
    """
    found: dict[str, object] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "outpace": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "commit": commit(),
    }
    if torch.device(device).type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def commit() -> str | None:
    """The commit of the checkout that this package lies in; None where it is installed."""
    here = Path(__file__)
    try:
        tracked = _git("ls-files", "--error-unmatch", here.name)
        return _git("rev-parse", "--short", "HEAD") if tracked else None
    except OSError:
        return None  # no git here


def _git(*words: str) -> str | None:
    done = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
