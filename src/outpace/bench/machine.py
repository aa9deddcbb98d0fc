"""Description of the machine of a benchmark, for the record."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch
import transformers

from outpace._version import __version__
from outpace.native.pool import follow_torch
from outpace.targets.hardware import processor


def machine(device: str) -> dict[str, object]:
    """Look up the processor, the versions, and the commit if this is a checkout.

    Args:
        device: the model's, as torch writes it. The name of a GPU is added as ``device``.
    """
    found: dict[str, object] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": follow_torch(),
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
    """The commit of the checkout that contains this package; None if it is installed."""
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
