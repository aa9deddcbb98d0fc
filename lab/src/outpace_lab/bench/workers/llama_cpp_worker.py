"""Adapter of llama.cpp for ``worker.py``, in the environment that has llama-cpp-python.

The cache is emptied before each prompt, so that every prompt is prefilled, as by all other methods. Keys and
values have the model's dtype, as in the other methods, instead of llama.cpp's default, float16.
"""

from __future__ import annotations

import time
from typing import Any

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml's type numbers, not all of which llama_cpp names
_TOKENS = 10  # per draft, llama-cpp-python's default


class Drafts:
    """A draft model of llama-cpp-python, with counts of its drafts for the answer so far.

    It is called before each step but the first, which prefills the prompt.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.sizes: list[int] = []
        self.lengths: list[int] = []
        self.output: list[int] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        found = self._model(*args, **options)
        self.sizes.append(len(found))
        self.lengths.append(len(self.output))
        return found

    def begin(self, output: list[int]) -> None:
        """Start another answer, which grows in ``output``."""
        self.output = output
        self.sizes.clear()
        self.lengths.clear()

    def accepted(self) -> list[int]:
        """Count the accepted tokens of each step that had a draft."""
        ends = [*self.lengths[1:], len(self.output)]
        return [end - start - 1 for start, end in zip(self.lengths, ends, strict=True)]


class Decoder:
    """A llama.cpp model, with plain decoding or prompt lookup."""

    packages = ("llama-cpp-python", "numpy")

    def __init__(self, load: dict[str, Any]) -> None:
        import llama_cpp

        self._drafts = None
        if load["kind"] == "prompt_lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._drafts = Drafts(LlamaPromptLookupDecoding(num_pred_tokens=_TOKENS))
        kind = _TYPES[load["dtype"]]
        self._eos = set(load["eos"])
        self._llama = llama_cpp.Llama(
            model_path=load["model"],
            n_ctx=load["length"],
            n_threads=load["threads"],
            n_threads_batch=load["threads"],
            n_gpu_layers=-1 if str(load["device"]).startswith("cuda") else 0,
            type_k=kind,
            type_v=kind,
            draft_model=self._drafts,
            logits_all=self._drafts is not None,
            verbose=False,
        )

    def begin(self, asked: dict[str, Any]) -> None:
        """Empty the cache."""
        if len(asked["prompts"]) > 1:
            raise ValueError("llama-cpp-python decodes one prompt at a time; use --batch 1")
        self._asked = asked
        self._llama.reset()
        self._llama.set_seed(asked["seed"])

    def decode(self) -> tuple[list[list[int]], float]:
        """Decode the prompt."""
        asked, first = self._asked, 0.0
        output: list[int] = []
        if self._drafts is not None:
            self._drafts.begin(output)
        began = time.perf_counter()
        tokens = self._llama.generate(
            asked["prompts"][0],
            temp=asked["temperature"],
            top_k=0,
            top_p=asked["top_p"],
            min_p=0.0,
            repeat_penalty=1.0,
            reset=True,
        )
        for token in tokens:
            output.append(int(token))
            if len(output) == 1:
                first = time.perf_counter() - began
            if len(output) == asked["max_new_tokens"] or (asked["ends"] and token in self._eos):
                break
        tokens.close()
        return [output], first

    def counts(self, outputs: list[list[int]]) -> dict[str, Any]:
        """Count the steps and drafts of the answer."""
        accepted = [] if self._drafts is None else self._drafts.accepted()
        steps = len(outputs[0]) if self._drafts is None else 1 + len(accepted)
        return {
            "forwards": steps,
            "steps": steps,
            "drafted": 0 if self._drafts is None else sum(self._drafts.sizes),
            "accepted": sum(accepted),
            "accepted_at": [
                sum(one > depth for one in accepted) for depth in range(max(accepted, default=0))
            ],
        }
