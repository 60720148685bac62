"""Fields: which lines and fields of a log go into an archive, by name.

Owns the lists. Must never hold a name whose text a client writes, nor one of an address: what is not on a list is left
out, and a test holds the lists against every line that the code logs.
"""

from __future__ import annotations

import re
from dataclasses import fields

from daemon.core.reasons import EndReason, Verdict
from daemon.core.state import Totals
from daemon.frontend.envelope import KNOWN_ROUTES

EVENTS = frozenset(
    (
        "Accepted", "CannotStart", "ChildEnded", "ChildKilled", "ChildRestarts", "ChildSilent", "ChildStarted",
        "CompressFailed", "ConcurrencyClamped", "CrashFile", "CrashFileFailed", "Diverged", "Ended",
        "EpochBegan", "EpochLost", "EpochRestart", "Failed", "FailedToo", "FaultFired", "FaultsPlanted",
        "Finished", "FrontEndCannotStart", "HttpConnectionFailed", "HttpRequest", "HttpRequestFailed",
        "HttpServer", "InsecureEndpoint", "Interrupted", "InvariantBroken", "JournalDegraded",
        "JournalNotClosed", "JournalOpened", "JournalRepaired", "LinesLeftOut", "LinesLost", "Listening",
        "NotResumed", "ObserveFailed", "Opened", "PrefixCache", "Progressing", "RankFault", "RankJoined",
        "RankReady", "RankStarted", "RanksNotTold", "Recovered", "RecoveryNote", "Refused", "ReuseCannotOccur",
        "SegmentReplaced", "Signal", "Sizing", "SnapshotFailed", "Snapshotted", "Stalled", "Starting",
        "StoppedAtStart", "StoppedWithOpenRequests", "Stopping", "UnknownSetting", "WaitingForRanks",
        "ask_failed", "begun", "cannot connect", "cannot go on", "daemon_connected", "daemon_left",
        "daemon_lost", "fault", "front_end_connected", "front_end_disconnected", "front_end_lost", "joined",
        "logical digest differs from the daemon's", "malformed_message", "not joined", "orphaned", "ready",
        "sizing", "slow_reader_cut", "stopped", "too_many_front_ends", "too_many_watchers", "version_mismatch",
        "watcher_left",
        *(verdict.capitalize() for verdict in Verdict),
    )
)  # fmt: skip
"""What lines are named: the event of another one is left out."""

FIELDS = frozenset(
    (
        "actor", "again", "age_ms", "ahead", "answer", "arena_bytes", "band", "bands", "blocked_by", "boot_s",
        "by", "bytes", "cached_tokens", "candidates", "capacity_pages", "changed", "child", "choice", "choices",
        "chunk_pages", "chunk_tokens", "clean", "code", "confirmed_tokens", "connected", "connects", "core",
        "degraded", "detail", "device", "draining", "dtype", "durable", "effect", "elapsed_ms", "enabled",
        "end", "ending", "epoch", "error", "errors", "event", "exception", "exit_code", "extent", "faults", "field",
        "file", "finish_reasons", "first_token_ms", "flights", "flushed", "frontend", "frontends", "gauges",
        "generation", "gifts", "gone", "health", "held_tokens", "held_units", "hit_cut", "how", "id", "ids",
        "in_flight", "journal", "kept_logprob_bytes", "kernels", "kind", "kinds", "known", "known_ids",
        "last_loss", "last_sequence", "left", "left_did", "left_out", "left_tokens", "level", "life", "limit",
        "limit_bytes", "limit_messages", "line", "lines", "lines_dropped", "live", "live_requests", "lives",
        "losses", "lost_tokens", "mark", "matched_tokens", "max_output", "max_tokens", "meaning", "model",
        "monotonic_ns", "most", "n", "name", "next", "next_priority", "next_redo_tokens", "next_request",
        "note", "number", "numpy", "of", "op", "open_requests", "others", "output_tokens", "own_priority",
        "pages", "parked", "patience_s", "pause_s", "pause_us", "pid", "pin_ms", "pins_dropped_total",
        "pins_refused_total", "policy", "prefilling", "priority", "process", "processed_through", "progress",
        "prompt_tokens", "protected", "queried_tokens", "queue", "queue_ms", "queued", "queued_messages",
        "rank", "ranks", "reach_tokens", "read_by", "ready", "reason", "reasons", "recomputed_tokens",
        "records", "recovered_s", "redo_tokens", "relief", "report", "reported", "reported_seq", "request",
        "requests", "resident", "restart", "restarts", "restarts_max", "restarts_within_window", "retractions",
        "retry_s", "right", "right_did", "row", "rows", "runner", "running", "scheduled_tokens", "seconds",
        "seq", "sequence", "settings", "share_ppm", "shared_pages", "short", "sibling", "signal", "silence_s",
        "silent_s", "snapshot", "stage", "stalled_s", "state", "state_cache", "status", "step", "step_tokens",
        "steps", "stop_ids", "stopped", "stopped_at", "stream", "streams", "suspects", "synced_through",
        "takeover", "threads", "throttled_steps", "times", "timestamp", "tokens", "told", "took_ms", "torch",
        "total_ms", "trace", "transformers", "triton", "units", "units_short", "unlocked_pages",
        "unsynced_bytes", "value", "versions", "virtual_pages", "waited_ms", "waiting", "waits_for",
        "waits_numbers", "wanted_tokens", "watches", "what", "while_doing", "why", "within_s",
        *(f"{field.name}_total" for field in fields(Totals)),
    )
)  # fmt: skip
"""Fields of the daemon, launcher and ranks, and of what the daemon says of itself; numbers of these go as they are."""

BY_BAND = re.compile(
    r"(?:(?:[a-z]{1,16}_){0,3}units_)?(?:full|window|state)(?:_total)?|states_(?:given|hit)_[a-z]{1,12}_total"
)
"""Numbers of a band, or of a kind of checkpoint, whose name is in the field's."""

OF_FRONT_ENDS = frozenset(
    (
        "cached_tokens", "choices", "code", "elapsed_ms", "end", "epoch", "event", "exception", "exit_code",
        "finish_reasons", "first_token_ms", "id", "level", "life", "lines_dropped", "method", "open_requests",
        "output_tokens", "path", "pid", "process", "prompt_tokens", "request_id", "signal", "status", "stream",
        "streams", "timestamp", "within_s",
    )
)  # fmt: skip
"""All that goes of a front end's lines."""

WORDS = frozenset(
    (
        "actor", "band", "child", "device", "dtype", "ending", "field", "file", "gone", "hit_cut", "kernels", "kind",
        "kinds", "left", "left_did", "level", "life", "line", "mark", "meaning", "numpy", "op", "policy", "process",
        "reason", "right", "right_did", "runner", "signal", "stage", "state", "state_cache", "timestamp", "torch",
        "transformers", "triton", "waits_for",
    )
)  # fmt: skip
"""Text of these is of our own making, or names a version or a device."""

SENTENCES = frozenset(
    (
        "blocked_by", "degraded", "detail", "effect", "error", "errors", "faults", "how", "last_loss", "model", "note",
        "others", "reasons", "what", "while_doing", "why",
    )
)  # fmt: skip
"""Sentences of our own, and the model's name. A front end's may repeat what a client sent: those are left out."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
ROUTES = frozenset(KNOWN_ROUTES)
ENDS = frozenset((*EndReason, "none", "hang_up"))
CODE = re.compile(r"[a-z_]{1,48}|\d{1,3}")
"""An error's code: of our own making in every line, and a word or a status."""
