"""Metrics: the daemon's Prometheus registry; names as in vLLM where the meaning is the same.

Owns the registry and its metric objects. Must never change anything that serves: it reads what it is given. The numbers
of `ACCOUNT` and `journal_sequence` follow the engine's written iterations, together: a scrape has what became of all
requests behind exactly that record. Histograms follow them too; all other numbers of the core are what they are when
somebody asks. Counters are of one life of the daemon, which `life` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from daemon.blame import Mark
from daemon.core.account import Account
from daemon.core.limits import CoreConfig
from daemon.core.reasons import EndReason

PREFIX = "bandmaster:"
QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 120)
STEP_BUCKETS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3, 10)
CORE_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 3e-3, 1e-2, 0.1)
RECOVERY_BUCKETS = (0.5, 1, 2, 5, 10, 20, 60, 180, 600, 1800)
SYNC_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1)
TOKEN_BUCKETS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 100_000)
BAND_STATES = ("live", "hole", "pending", "beyond")

# Gauges of the core and the metric each is shown as.
CORE_GAUGES = {
    "running": ("num_requests_decoding", "requests whose prompt is covered"),
    "prefilling": ("num_requests_prefilling", "requests whose prompt is being computed"),
    "parked": ("num_requests_parked", "requests that hold memory and make no progress at the moment"),
    "suspects": (
        "num_requests_suspected",
        "requests under which epochs died, each to be tried alone before others run",
    ),
    "in_flight": ("num_steps_in_flight", "forwards sent and not reported"),
    "capacity_pages": ("capacity_pages", "pages that an empty arena holds"),
    "draining": ("draining", "1 while nothing new is admitted"),
}
# Fields of `Account` and the metric each is shown as, behind one written iteration: first counters, then gauges.
ACCOUNT_TOTALS = {
    "received": ("requests_received", "requests that arrived, choices counted"),
    "refused": ("requests_refused", "requests refused, choices counted"),
    "accepted": ("requests_accepted", "requests accepted, choices counted"),
    "recovered": ("requests_recovered", "requests of an earlier life that go on in this one, choices counted"),
    "finished": ("requests_finished", "requests that ended with reason stop or length, choices counted"),
    "aborted": ("requests_aborted", "requests that ended with reason abort, choices counted"),
    "failed": ("requests_failed", "requests that ended with any other reason, choices counted"),
    "repeated": ("requests_repeated", "arrivals whose id was known with the same content, answered again"),
}
ACCOUNT_GAUGES = {
    "live": ("num_requests_live", "requests that have not ended"),
    "holding": ("num_requests_running", "requests that have a row, prefilling ones included"),
    "waiting": ("num_requests_waiting", "requests in the queue, which have no row"),
}
# Totals of the core and the counter each is shown as.
CORE_TOTALS = {
    "prompt_tokens_total": ("prompt_tokens", "prompt tokens scheduled"),
    "output_tokens_total": ("generation_tokens", "output tokens committed"),
    "retractions_total": ("num_preemptions", "requests that gave everything back and wait again"),
    "preemptions_total": ("priority_preemptions", "of those, to make place for a request of higher priority"),
    "retracted_tokens_total": ("retracted_tokens", "tokens whose computation a retraction threw away"),
    "recomputed_tokens_total": ("recomputed_tokens", "tokens scheduled again by requests that had them before"),
    "climbs_total": ("relief_climbs", "times the next step did not fit and the relief ladder was climbed"),
    "parks_total": ("parks", "times a request was parked"),
    "stalls_total": ("stalls", "times work waited and no token was scheduled for long"),
    "checkpoints_kept_total": ("checkpoints_kept", "recurrent states kept in a request's checkpoint slot"),
    "checkpoints_given_total": ("checkpoints_given", "recurrent states given to the prefix cache"),
    "checkpoints_skipped_total": ("checkpoints_skipped", "recurrent states not given for want of a fresh slot"),
    "cache_flushes_total": ("cache_flushes", "orders to empty the prefix cache that were carried out"),
    "steps_total": ("steps", "steps sent to the ranks"),
    "forwards_total": ("forwards", "steps with a forward"),
    "passes_total": ("passes", "scheduling passes, with a step or without"),
    "pins_refused_total": ("pins_refused", "prefixes that were not pinned: all pins together would pass --pinned-max"),
    "pins_dropped_total": ("pins_dropped", "pinned parts of prefixes given up early: nothing else was left"),
}
# Numbers of the core whose names end in a band's, and the metric with that band as label.
BAND_GAUGES = {
    "cached_units_": ("cached_units", "units that the prefix cache holds, per band, on each stage"),
    "reclaimable_units_": ("reclaimable_units", "of those, units that no request reads, per band, on each stage"),
    "pinned_units_": ("pinned_units", "units of the prefix cache that pins name, per band"),
}
BAND_TOTALS = {
    "evicted_units_": ("evicted_units", "units taken back from the prefix cache, per band"),
    "quota_evicted_units_": ("quota_evicted_units", "of those, units beyond the quota of their namespace, per band"),
}
# The same by why a state is in the prefix cache; see `daemon.core.grid`.
KIND_TOTALS = {
    "states_given_": (
        "checkpoints_given_by_kind",
        "recurrent states given to the prefix cache, by why they are wanted",
    ),
    "states_hit_": ("checkpoints_hit_by_kind", "requests that started from a cached state, by why it was wanted"),
}
POLICIES = ("schedule_policy", "eviction_policy", "checkpoint_policy", "reserve")  # fields of `CoreConfig`
NO_CUT = "none"


class Metrics:
    """Every metric of the daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {name: self._gauge(shown, text) for name, (shown, text) in CORE_GAUGES.items()}
        self._totals = {name: self._counter(shown, text) for name, (shown, text) in CORE_TOTALS.items()}
        self._told: dict[str, int] = dict.fromkeys(self._totals, 0)
        self._account_totals = {name: self._counter(*row) for name, row in ACCOUNT_TOTALS.items()}
        self._account_gauges = {name: self._gauge(*row) for name, row in ACCOUNT_GAUGES.items()}
        self._account = Account()
        self._band_gauges = {name: self._gauge(*row, ["band"]) for name, row in BAND_GAUGES.items()}
        self._part_totals = {name: self._counter(*row, ["band"]) for name, row in BAND_TOTALS.items()}
        self._part_totals |= {name: self._counter(*row, ["kind"]) for name, row in KIND_TOTALS.items()}
        self._prefix_metrics()
        self._life = self._gauge("life", "1 for the life of the daemon whose numbers these are", ["life"])
        self._policies = self._gauge("policies", "1 for the policies that this daemon runs with", list(POLICIES))
        self._bands = self._gauge(
            "units",
            "units per band, pipeline stage and state; what is cached is so on every stage",
            ["band", "stage", "state"],
        )
        self._gateway = self._gauge("gateway_events", "counters of the gateway, hostile messages among them", ["event"])
        self._ranks = self._gauge("rank_stream_events", "counters of the rank streams", ["event"])
        self.success = self._counter("request_success", "ended choices by reason", ["finished_reason"])
        for reason in EndReason:
            self.success.labels(reason.value)
        self.queue_time = self._histogram("request_queue_time_seconds", "from arrival to admission", QUEUE_BUCKETS)
        self.first_token = self._histogram(
            "daemon_time_to_first_token_seconds", "from arrival at the daemon to the first token", QUEUE_BUCKETS
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "prompt tokens of ended choices", TOKEN_BUCKETS)
        self.output_length = self._histogram(
            "request_generation_tokens", "output tokens of ended choices", TOKEN_BUCKETS
        )
        self.forward_time = self._histogram("forward_seconds", "from launch to tokens, slowest rank", STEP_BUCKETS)
        self.core_time = self._histogram("core_seconds", "core and journal encoding of one iteration", CORE_BUCKETS)
        self.write_time = self._histogram("journal_write_seconds", "the one write of an iteration", CORE_BUCKETS)
        self.sync_time = self._histogram("journal_sync_seconds", "one fsync of the journal", SYNC_BUCKETS)
        self.journal_sequence = self._gauge("journal_sequence", "newest journal record")
        self.journal_unsynced = self._gauge("journal_unsynced_bytes", "journal bytes not known on disk")
        self.journal_repairs = self._gauge(
            "journal_segments_replaced", "journal files that failed and were replaced by a new segment, nothing lost"
        )
        self.snapshots = self._gauge("snapshots", "snapshots of this life")
        self.flushes_asked = self._gauge("flushes_asked", "opportunistic flushes asked for")
        self.epoch = self._gauge("epoch", "the newest life of the device memory, counted from the daemon's start")
        self.epoch_restarts = self._counter("epoch_restarts", "times all ranks were started again after one was lost")
        self.rank_losses = self._counter("rank_losses", "epochs that were lost, by how that was noticed", ["mark"])
        for mark in Mark:
            self.rank_losses.labels(mark.name.lower())
        self.recovery_time = self._histogram(
            "epoch_recovery_seconds", "from the first sign of a lost rank to the next epoch", RECOVERY_BUCKETS
        )
        self.observe_failures = self._counter("observe_failures", "failures inside metrics and logs themselves")
        self.log_lines_lost = self._gauge(
            "log_lines_lost", "lines of the log that were dropped or could not be written"
        )

    def set_life(self, life: str, config: CoreConfig) -> None:
        """Say whose numbers these are, and under which policies everything is counted."""
        self._life.labels(life).set(1)
        self._policies.labels(*(getattr(config, name) for name in POLICIES)).set(1)

    def written(self, sequence: int, account: Account | None) -> None:
        """An iteration was written through record `sequence`; `account` is the core's behind it, None: as before."""
        self.journal_sequence.set(sequence)
        before = self._account
        if account is None or account == before:
            return
        for name, counter in self._account_totals.items():
            if new := getattr(account, name) - getattr(before, name):
                counter.inc(new)
        for name, gauge in self._account_gauges.items():
            gauge.set(getattr(account, name))
        self._account = account

    def ended(self, reasons: Iterable[str]) -> None:
        """Choices ended, for these reasons."""
        for reason in reasons:
            self.success.labels(reason).inc()

    def set_core(self, gauges: Mapping[str, int]) -> None:
        """Take over the core's gauges and totals."""
        for name, gauge in self._gauges.items():
            gauge.set(gauges.get(name, 0))
        for name, counter in self._totals.items():
            now = gauges.get(name, 0)
            counter.inc(max(0, now - self._told[name]))
            self._told[name] = now

        for name, number in gauges.items():
            self._set_part(name, number)

    def _set_part(self, name: str, number: int) -> None:
        """Take over a number of the core that belongs to one band or kind, by its name's prefix; ignores all others."""
        for prefix, gauge in self._band_gauges.items():
            if name.startswith(prefix):
                gauge.labels(name.removeprefix(prefix)).set(number)
        for prefix, counter in self._part_totals.items():
            if name.startswith(prefix):
                counter.labels(name.removeprefix(prefix).removesuffix("_total")).inc(
                    max(0, number - self._told.get(name, 0))
                )
                self._told[name] = number

    def _prefix_metrics(self) -> None:
        """What admissions found in the prefix cache."""
        self.queries = self._counter("prefix_cache_queries", "tokens looked up in the prefix cache, at first admission")
        self.hits = self._counter("prefix_cache_hits", "of those, tokens found there and not computed")
        self.resumed_queries = self._counter(
            "prefix_cache_resumed_queries", "tokens looked up in the prefix cache by requests that were retracted"
        )
        self.resumed_hits = self._counter("prefix_cache_resumed_hits", "of those, tokens found there and not computed")
        self.lookups = self._counter(
            "prefix_cache_lookups",
            "look-ups by what ended the hit: full (no shared prefix beyond it), window:TOKENS or state (the prefix is "
            "known and lacks this part), none (every whole page before the last token was found)",
            ["cut"],
        )
        self.unusable = self._counter(
            "prefix_cache_unusable_tokens",
            "tokens known to the prefix cache and computed, by the missing part",
            ["cut"],
        )

    def looked_up(self, queried: int, cached: int, matched: int, cut: str, resumed: bool) -> None:
        """An admission looked `queried` tokens up; `cached` of `matched` known ones are used, `cut` ended the hit."""
        (self.resumed_queries if resumed else self.queries).inc(queried)
        (self.resumed_hits if resumed else self.hits).inc(cached)
        self.lookups.labels(cut or NO_CUT).inc()
        if matched > cached:
            self.unusable.labels(cut or NO_CUT).inc(matched - cached)

    def set_bands(self, stages: Sequence[Mapping[str, tuple[int, int, int, int]]]) -> None:
        """Units per band of each stage, as the ranks reported them last."""
        for stage, bands in enumerate(stages):
            for name, states in bands.items():
                for state, units in zip(BAND_STATES, states, strict=True):
                    self._bands.labels(name, str(stage), state).set(units)

    def set_events(self, gateway: Mapping[str, int], ranks: Mapping[str, int]) -> None:
        """Plain counters of the sockets."""
        for name, count in gateway.items():
            self._gateway.labels(name).set(count)
        for name, count in ranks.items():
            self._ranks.labels(name).set(count)

    def exposition(self) -> str:
        """Everything in Prometheus text format."""
        return generate_latest(self.registry).decode()

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(PREFIX + name, text, labels or [], registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(PREFIX + name, text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)
