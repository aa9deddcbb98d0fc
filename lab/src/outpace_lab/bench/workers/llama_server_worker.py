"""Adapter of llama-server's engine for ``worker.py``, in the environment that has xllamacpp.

Drafts have the defaults of llama-server's ``--spec-type``. Prompts are not cached, so that every prompt is
prefilled, as by all other methods.
"""

from __future__ import annotations

from typing import Any

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml's type numbers


class Decoder:
    """llama-server's engine with one slot, in this process."""

    packages = ("xllamacpp",)

    def __init__(self, load: dict[str, Any]) -> None:
        self._load = load
        self._server = self._made()
        self._used = False

    def _made(self) -> Any:
        import xllamacpp

        load, params = self._load, xllamacpp.CommonParams()
        params.model.path = load["model"]
        params.n_ctx, params.n_parallel = load["length"], 1
        params.n_gpu_layers = -1 if str(load["device"]).startswith("cuda") else 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = load["threads"]
        params.cache_type_k = params.cache_type_v = _TYPES[load["dtype"]]
        params.verbosity, params.cache_ram_mib = 0, 0
        if load["kind"] != "plain":
            name = f"COMMON_SPECULATIVE_TYPE_{load['kind'].upper().replace('-', '_')}"
            params.speculative.types = [xllamacpp.common_speculative_type[name]]
        return xllamacpp.Server(params)

    def begin(self, asked: dict[str, Any]) -> None:
        """Forget earlier outputs where a suite begins: drafts are looked up in them too."""
        if len(asked["prompts"]) > 1:
            raise ValueError("llama-server has one slot here; use --batch 1")
        if asked["fresh"] and self._used and self._load["kind"] != "plain":
            self._server = None
            self._server = self._made()
        self._used = True
        self._asked = {
            "prompt": asked["prompts"][0],
            "n_predict": asked["max_new_tokens"],
            "temperature": asked["temperature"],
            "top_k": 0,
            "top_p": asked["top_p"],
            "min_p": 0.0,
            "seed": asked["seed"],
            "ignore_eos": not asked["ends"],
            "cache_prompt": False,
            "logprobs": 1,  # the answer then contains token ids
        }

    def decode(self) -> tuple[list[list[int]], float]:
        """Decode the prompt."""
        found = self._server.handle_completions(self._asked)
        if "error" in found:
            raise ValueError(found["error"]["message"])
        (choice,), self._timings = found["choices"], found["timings"]
        output = [token["id"] for token in (choice["logprobs"] or {"content": []})["content"]]
        ended = choice["finish_reason"] == "stop" and self._load["eos"]
        if ended and (not output or output[-1] not in self._load["eos"]):
            output.append(self._load["eos"][0])  # the answer lacks the token that ended it
        return [output], self._timings["prompt_ms"] / 1e3

    def counts(self, outputs: list[list[int]]) -> dict[str, Any]:
        """Count the steps and drafts of the answer."""
        accepted = self._timings.get("draft_n_accepted", 0)
        steps = len(outputs[0]) - accepted
        return {
            "forwards": steps,
            "steps": steps,
            "drafted": self._timings.get("draft_n", 0),
            "accepted": accepted,
        }
