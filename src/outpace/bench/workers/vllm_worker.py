"""Decodes with vLLM what ``worker.py`` was asked, in the environment that has vLLM.

Prefixes are not cached, so that every prompt is read anew, as by all other methods.
"""

from __future__ import annotations

import os
import time
from typing import Any

# In this process, so that it ends with it; and no word to anybody.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB

_TOKENS = 5  # a draft's, as vLLM's own examples have it
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


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


class Decoder:
    """An engine of vLLM's."""

    def __init__(self, load: dict[str, Any]) -> None:
        import vllm

        self.version = vllm.__version__
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
            seed=0,
            **options,
        )
        self._drafts = config is not None

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answers, and the counts of the run; the time of the prompt is that of a run for one token."""
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        first, _ = self._decode(prompts, asked, 1)
        before = self._counts()
        seconds, outputs = self._decode(prompts, asked, asked["max_new_tokens"])
        after = self._counts()
        found: dict[str, Any] = {
            "outputs": outputs,
            "seconds": seconds,
            "first_seconds": min(first, seconds),
            "first_tokens": len(prompts),
        }
        if not self._drafts:
            return {**found, "steps": sum(map(len, outputs)), "drafted": 0, "accepted": 0}
        counts = {name: after[name] - before.get(name, 0) for name in after if name != "at"}
        earlier = before.get("at") or []
        at = [now - (earlier[i] if i < len(earlier) else 0) for i, now in enumerate(after.get("at") or [])]
        accepted = counts.get("accepted", 0)
        # What a last step accepted past the end counts as accepted, so that steps may be a few too few.
        return {
            **found,
            "steps": max(len(prompts), sum(map(len, outputs)) - accepted),
            "drafted": counts.get("drafted", 0),
            "accepted": accepted,
            "accepted_at": at,
        }

    def _decode(
        self, prompts: list[Any], asked: dict[str, Any], tokens: int
    ) -> tuple[float, list[list[int]]]:
        params = self._vllm.SamplingParams(
            max_tokens=tokens,
            temperature=asked["temperature"],
            seed=asked["seed"] if asked["temperature"] else None,
            ignore_eos=not asked["ends"],
            detokenize=False,
        )
        began = time.perf_counter()
        found = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, [list(one.outputs[0].token_ids) for one in found]

    def _counts(self) -> dict[str, Any]:
        """vLLM's counters of speculative decoding so far."""
        if not self._drafts:
            return {}
        found: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] = found.get(_COUNTERS[metric.name], 0) + metric.value
            elif metric.name == _BY_POSITION:
                found["at"] = list(metric.values)
        return found
