"""Metrics of the front end: latencies as clients see them, counts of answers and their ends.

Owns this process's registry. Must never raise into serving. Names are vLLM's where the meaning is the same, under the
prefix `bandmaster:`; what the daemon knows better (queue, memory, tokens, finish reasons) comes from its own text, so
no name here may be one of `daemon.metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40, 160)
LONG_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)

PREFIX = "bandmaster:"
CLIENT_EVENTS = ("connects", "lost", "resumed", "sent_again", "given_up", "holes")


class ChoiceClock:
    """The latencies of one choice; `now_s` is any monotonic clock."""

    __slots__ = ("_first_s", "_last_s", "_metrics", "_now_s", "_start_s", "tokens_seen")

    def __init__(self, metrics: Metrics, now_s: Callable[[], float], start_s: float) -> None:
        self._metrics, self._now_s, self._start_s = metrics, now_s, start_s
        self._first_s = self._last_s = 0.0
        self.tokens_seen = 0

    def tokens(self, count: int) -> None:
        """`count` tokens came at once: the first ones give TTFT, later ones their mean distance."""
        if not count:
            return
        now = self._now_s()
        if self.tokens_seen == 0:
            self._first_s = now
            self._metrics.time_to_first_token.observe(now - self._start_s)
        else:
            self._metrics.inter_token_latency.observe((now - self._last_s) / count)
        self._last_s = now
        self.tokens_seen += count

    def ended(self) -> None:
        """The choice ended well."""
        metrics = self._metrics
        metrics.e2e_latency.observe(self._now_s() - self._start_s)
        if self.tokens_seen > 1:
            metrics.time_per_output_token.observe((self._last_s - self._first_s) / (self.tokens_seen - 1))

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token, once there was one."""
        return self._first_s - self._start_s if self.tokens_seen else None


class Metrics:
    """This process's own registry of counters and histograms."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.now_s = now_s

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", SHORT_S)
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between deliveries of one request, by the tokens delivered", SHORT_S
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first", SHORT_S
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the end", LONG_S)
        self.responses = Counter(
            PREFIX + "http_responses", "Answers by route and status", ("route", "status"), registry=registry
        )
        self.ends = Counter(
            PREFIX + "http_request_ends",
            "Ends of requests as clients saw them: ok, an error's code, or hang_up",
            ("route", "end"),
            registry=registry,
        )
        self.open = Gauge(PREFIX + "http_open_requests", "Requests being served by this front end", registry=registry)
        self.daemon_up = Gauge(PREFIX + "daemon_up", "1 while the daemon answers this front end", registry=registry)
        self.daemon_events = Gauge(
            PREFIX + "daemon_client_events",
            "Since this front end started: connections made and lost, choices taken up after a loss, requests sent "
            "again or given up, messages found missing",
            ("event",),
            registry=registry,
        )

    def clock(self, start_s: float | None = None) -> ChoiceClock:
        """A clock that started at `start_s` of `now_s`, or starts now."""
        return ChoiceClock(self, self.now_s, self.now_s() if start_s is None else start_s)

    def set_client(self, stats: Mapping[str, int]) -> None:
        """What the daemon's client has counted."""
        for event in CLIENT_EVENTS:
            self.daemon_events.labels(event).set(stats.get(event, 0))

    def text(self) -> str:
        """All of this process's metrics in the exposition format."""
        return generate_latest(self.registry).decode()
