"""Metrics for Prometheus: vLLM's names where they mean the same, `paged_kv` before the others."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from paged_kv.serve.backend import Backend, Job, Piece

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "Samples that gave their pages back and were computed again."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Tokens of prompts that were looked for in the cache."),
    "vllm:prefix_cache_hits": ("found_tokens", "Those of them that it had."),
    "vllm:spec_decode_num_draft_tokens": ("draft_tokens", "Tokens that speculation drafted."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Those of them that were chosen."),
    "paged_kv:disk_tokens": ("restored_tokens", "Tokens of prompts that were read from the disk."),
}
_GAUGES = {
    "vllm:num_requests_running": ("running", "Samples that have pages."),
    "vllm:num_requests_waiting": ("waiting", "Samples that wait for pages or for their turn."),
}


class Metrics:
    """The metrics of one model.

    Args:
        name: The name of the model.
        backend: Is asked how it stands when metrics are read.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        self._name, self._backend = name, backend
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

        def histogram(what: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{what}", text, ["model_name"], registry=self._registry, buckets=buckets).labels(
                name
            )

        def counter(what: str, text: str) -> Counter:
            return Counter(f"vllm:{what}", text, ["model_name"], registry=self._registry).labels(name)

        self._first = histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of a sample.")
        self._whole = histogram("e2e_request_latency_seconds", "From a request to its end.")
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens that a request was given.", _TOKENS)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._tokens = counter("generation_tokens", "Tokens that were generated.")
        self._ends = Counter(
            "vllm:request_success", "Requests by how they ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip

    async def watch(self, job: Job, batches: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[list[Piece], None]:
        """The pieces of a job, which are counted."""
        began = time.perf_counter()
        last: dict[int, float] = {}
        count, finish, is_answered = 0, "abort", False
        try:
            async with aclosing(batches):
                async for batch in batches:
                    now = time.perf_counter()
                    if not last:
                        self._first.observe(now - began)
                    for piece in batch:
                        if piece.sample in last:
                            self._between.observe(now - last[piece.sample])
                        last[piece.sample] = now
                        count += len(piece.tokens)
                        is_answered |= bool(piece.tokens) or piece.vector is not None
                        finish = piece.finish or finish
                    self._tokens.inc(sum(len(piece.tokens) for piece in batch))
                    yield batch
        finally:
            if is_answered:
                self._ends.labels(self._name, finish).inc()
                self._prompt_tokens.inc(len(job.tokens))
                self._prompt.observe(len(job.tokens))
                self._generated.observe(count)
                self._whole.observe(time.perf_counter() - began)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Return how the backend stands; called by `prometheus_client`."""
        status, labels = self._backend.status(), [self._name]
        for name, (field, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(labels, getattr(status, field))
            yield gauge
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(labels, getattr(status, field))
            yield counter
        total = status.free_pages + status.cached_pages + status.used_pages
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "The share of pages in use.", labels=["model_name"])
        usage.add_metric(labels, status.used_pages / max(total, 1))
        yield usage
        pages = GaugeMetricFamily("paged_kv:pages", "Pages of the cache.", labels=["model_name", "state"])
        for state in ("free", "cached", "used"):
            pages.add_metric([self._name, state], getattr(status, f"{state}_pages"))
        yield pages
