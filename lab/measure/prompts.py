"""Tokens of prompt per second: stock transformers and outpace, on SmolLM2, or a random model of its shape.

    OMP_NUM_THREADS=1 python lab/measure/prompts.py [WHAT] [LENGTH ...]

WHAT is the type of another family, such as starcoder2 or cohere; or ``llama.cpp``, which is then beside them,
with the same weights in a GGUF file; or ``chunks``, for outpace with chunks of 128 to 1,024 rows; or
``threads``, for one thread and two, on two cores that do nothing else.

Run after `make real`. Processor time, or of threads the clock's, the median of rounds in which ways take
turns. A prompt is new, of random tokens; one token is generated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outpace import Engine, SamplingParams, Target
from outpace.embedded import smollm2_path
from outpace.targets.hardware import processor
from outpace.testing.gguf import write_gguf

_ROUNDS, _LONG = 3, 4096  # prompts from this length on are read in one round
_CHUNKS = (128, 256, 512, 1024)
_ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Read = Callable[[list[int]], object]


def model_of(family: str | None, dtype: torch.dtype) -> Any:
    """SmolLM2, or a random model of another family in its shape."""
    if family is None:
        return AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=dtype).eval()
    shape = AutoConfig.from_pretrained(smollm2_path()).to_dict()
    sizes = {
        name: value for name, value in shape.items() if name.endswith("_size") or name.startswith("num_")
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, max_position_embeddings=8192)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def stock(family: str | None, dtype: torch.dtype) -> Read:
    model = model_of(family, dtype)
    return lambda prompt: model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)


def outpaced(family: str | None, dtype: torch.dtype, **options: Any) -> Read:
    engine = Engine(Target(model_of(family, dtype)), **options)
    return lambda prompt: engine.generate([prompt], _ONE)


def with_threads(count: int, read: Read) -> Read:
    def run(prompt: list[int]) -> None:
        torch.set_num_threads(count)
        read(prompt)

    return run


def llama_cpp(dtype: str, longest: int) -> Read:
    from llama_cpp import Llama

    with TemporaryDirectory() as folder:
        file = Path(folder) / "smollm2.gguf"
        write_gguf(model_of(None, torch.float32), file, dtype, AutoTokenizer.from_pretrained(smollm2_path()))
        own = Llama(str(file), n_ctx=longest + 8, n_threads=1, n_threads_batch=1, verbose=False)

    def run(prompt: list[int]) -> None:
        own.reset()
        own.eval(prompt)

    return run


def ways(what: str | None, longest: int) -> dict[str, Read]:
    """What reads a prompt, by name."""
    found: dict[str, Read] = {}
    family = None if what in ("llama.cpp", "chunks", "threads") else what
    for name, dtype in _DTYPES.items():
        if what == "chunks":
            found |= {f"{size}, {name}": outpaced(None, dtype, prefill_chunk=size) for size in _CHUNKS}
            continue
        read = outpaced(family, dtype)
        if what == "threads":
            found |= {f"{count}, {name}": with_threads(count, read) for count in (1, 2)}
            continue
        found |= {f"transformers, {name}": stock(family, dtype), f"outpace, {name}": read}
        if what == "llama.cpp":
            found[f"llama.cpp, {name}"] = llama_cpp(name, longest)
    return found


@torch.inference_mode()
def main(what: str | None, lengths: list[int]) -> None:
    torch.set_num_threads(2 if what == "threads" else 1)
    clock = time.perf_counter if what == "threads" else time.process_time
    given = ways(what, max(lengths))
    print(processor(), *given, sep=" | ")
    for length in lengths:
        speeds: dict[str, list[float]] = {name: [] for name in given}
        for seed in range(_ROUNDS if length < _LONG else 1):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(100, 40_000, (length,), generator=generator).tolist()
            for name, read in given.items():
                began = clock()
                read(prompt)
                speeds[name].append(length / (clock() - began))
        print(length, *(f"{median(found):.0f}" for found in speeds.values()), sep=" | ", flush=True)


if __name__ == "__main__":
    named = next((word for word in sys.argv[1:] if not word.isdigit()), None)
    main(named, [int(word) for word in sys.argv[1:] if word.isdigit()] or [512, 2048, 8000])
