"""Prometheus metrics under vLLM's names, with the prefix ``outpace:``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outpace.core import Generation

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server.

    Args:
        model: the value of the label ``model_name``.
        running, waiting, memory: functions called when the metrics are read.
    """

    def __init__(
        self,
        model: str,
        running: Callable[[], float],
        waiting: Callable[[], float],
        memory: Callable[[], float],
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series per metric, without use
        self._registry = CollectorRegistry()
        self._model = model
        self._gauge("num_requests_running", "Sequences in the batch.", running)
        self._gauge("num_requests_waiting", "Requests that wait to join the batch.", waiting)
        self._gauge("kv_cache_usage_perc", "Share of the memory for keys and values in use.", memory)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens emitted.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._finished = self._counter("request_success", "Sequences that ended.", "finished_reason")
        self._refused = self._counter("requests_refused", "Requests refused.", "reason")
        self._steps = self._counter("spec_decode_num_drafts", "Steps of sequences with a drafter.", "drafter")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", "drafter")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", "drafter")
        self._positions = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by depth.", "drafter", "position"
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "Seconds to the first token.")
        self.between = self._histogram("inter_token_latency_seconds", "Seconds between tokens.")
        self.whole = self._histogram("e2e_request_latency_seconds", "Seconds of a sequence, queue included.")
        self.queued = self._histogram("request_queue_time_seconds", "Seconds to join the batch.")

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"outpace:{name}", text, ["model_name"], registry=self._registry)
        gauge.labels(self._model).set_function(read)

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        counter = Counter(f"outpace:{name}", text, ["model_name", *labels], registry=self._registry)
        return lambda *values: counter.labels(self._model, *values)

    def _histogram(self, name: str, text: str) -> Histogram:
        found = Histogram(f"outpace:{name}", text, ["model_name"], registry=self._registry, buckets=_SECONDS)
        return found.labels(self._model)

    def refused(self, reason: str) -> None:
        self._refused(reason).inc()

    def ended(self, prompt: int, generation: Generation, drafter: str) -> None:
        """Count a sequence that ended.

        Args:
            prompt: number of tokens of its prompt.
            drafter: name of its drafter; "off" for none.
        """
        stats = generation.stats
        self.prompt_tokens().inc(prompt)
        self.generation_tokens().inc(len(generation.tokens))
        self._prefix_queries().inc(prompt)
        self._prefix_hits().inc(min(stats.cached_tokens, prompt))
        self._finished({"eos": "stop"}.get(generation.finish_reason, generation.finish_reason)).inc()
        if drafter != "off":
            self._steps(drafter).inc(stats.steps)
            self._drafted(drafter).inc(stats.drafted)
            self._accepted(drafter).inc(stats.accepted)
            for position, count in enumerate(stats.accepted_per_position):
                self._positions(drafter, str(position)).inc(count)

    def families(self) -> Iterable[Metric]:
        return self._registry.collect()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Joined(Collector):
    """The metrics of several models, each name once with the samples of all.

    Args:
        parts: those of each model.
        own: metrics of the server's own.
    """

    def __init__(self, parts: Iterable[Metrics], own: CollectorRegistry) -> None:
        self._parts, self._own = list(parts), own

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for part in self._parts:
            for family in part.families():
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()
        yield from self._own.collect()

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)
