"""Decodes with llama.cpp what ``worker.py`` was asked, in the environment that has llama-cpp-python.

The cache is emptied before each prompt, so that every prompt is read anew, as by all other methods.
"""

from __future__ import annotations

import time
from typing import Any


class Decoder:
    """A model of llama.cpp's, plain or with its prompt lookup."""

    def __init__(self, load: dict[str, Any]) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        draft = None
        if load["kind"] == "prompt_lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=10)
            self._watch(draft)
        self._drafts = draft is not None
        self._eos = set(load["eos"])
        self._llama = llama_cpp.Llama(
            model_path=load["model"],
            n_ctx=load["length"],
            n_threads=load["threads"],
            n_threads_batch=load["threads"],
            n_gpu_layers=-1 if str(load["device"]).startswith("cuda") else 0,
            draft_model=draft,
            logits_all=draft is not None,
            verbose=False,
        )

    def _watch(self, draft: Any) -> None:
        """Count the drafts and their tokens."""
        inner = type(draft).__call__
        self.drafted: list[int] = []
        counts = self.drafted

        class Watched(type(draft)):  # type: ignore[misc]
            def __call__(self, *args: Any, **options: Any) -> Any:
                found = inner(self, *args, **options)
                counts.append(len(found))
                return found

        draft.__class__ = Watched

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answers, one prompt after the other."""
        if len(asked["prompts"]) > 1:
            raise ValueError("llama-cpp-python decodes one prompt at a time; use --batch 1")
        llama, (prompt,) = self._llama, asked["prompts"]
        llama.reset()
        if self._drafts:
            self.drafted.clear()
        output: list[int] = []
        first = 0.0
        began = time.perf_counter()
        tokens = llama.generate(
            prompt,
            temp=asked["temperature"],
            top_k=0,
            top_p=1.0,
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
        seconds = time.perf_counter() - began
        tokens.close()
        found: dict[str, Any] = {
            "outputs": [output],
            "seconds": seconds,
            "first_seconds": first,
            "first_tokens": 1,
        }
        if not self._drafts:
            return {**found, "steps": len(output), "drafted": 0, "accepted": 0}
        # A draft is asked for before each step but the first, which reads the prompt.
        steps = 1 + len(self.drafted)
        return {**found, "steps": steps, "drafted": sum(self.drafted), "accepted": len(output) - steps}
