"""Checks: what a message must satisfy beyond its types, one function per message type, in one table.

Owns representation: lengths of columns, ranges that fit the columns' integers, text sizes, finite numbers. Must never
judge what is the core's to judge (vocabulary, model length, memory, policy): it refuses that by code and by name.
A check raises `DecodeError`; it never changes the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from allocator.ops import Backup, CopyState, Fix, Flush, Load, Op, Rebind, UseOp
from ipc import messages as m
from ipc.errors import DecodeError
from ipc.handshake import Limits

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
DIGEST_BYTES = 16
LOGPROBS_MAX = 1 << 17  # k of one position: no vocabulary is larger
TEXT_BYTES_MAX = 1 << 20
BAND_NAME_BYTES_MAX = 64


def _fail(code: str, field: str, text: str) -> NoReturn:
    raise DecodeError(code, f"{field}: {text}", field)


def _text(field: str, value: str, bytes_max: int, empty: bool = True) -> None:
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > bytes_max:
        _fail("too_long", field, f"{size} bytes, the limit is {bytes_max}")
    if not empty and not value:
        _fail("empty", field, "must not be empty")


def _range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _fail("out_of_range", field, f"{value} is not between {low} and {high}")


def _finite(field: str, value: float) -> None:
    if not math.isfinite(value):
        _fail("not_finite", field, f"{value} is not a finite number")


def _column(field: str, value: bytes, width: int, rows: int = -1, rows_max: int = INT32_MAX) -> int:
    """Rows of a column of `width`-byte entries; with `rows` given it must have as many."""
    size, rest = divmod(len(value), width)
    if rest:
        _fail("column", field, f"{len(value)} bytes are no whole number of {width}-byte entries")
    if rows >= 0 and size != rows:
        _fail("column", field, f"{size} entries where {rows} belong")
    if size > rows_max:
        _fail("too_long", field, f"{size} entries, the limit is {rows_max}")
    return size


def _digest(field: str, value: bytes, may_be_empty: bool = False) -> None:
    if len(value) != DIGEST_BYTES and not (may_be_empty and not value):
        _fail("digest", field, f"{len(value)} bytes where {DIGEST_BYTES} belong")


def _sampling(value: m.Sampling) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        _finite(name, getattr(value, name))
    _range("top_k", value.top_k, -1, INT32_MAX)
    _range("logprobs", value.logprobs, -1, LOGPROBS_MAX)
    _range("prompt_logprobs", value.prompt_logprobs, -1, LOGPROBS_MAX)
    if value.seed is not None:
        _range("seed", value.seed, -INT64_MAX - 1, INT64_MAX)


def _logprobs(field: str, value: m.Logprobs) -> None:
    _range(f"{field}.k", value.k, 0, LOGPROBS_MAX)
    positions = _column(f"{field}.chosen", value.chosen, 4)
    _column(f"{field}.ranks", value.ranks, 4, positions)
    _column(f"{field}.top_ids", value.top_ids, 8, positions * value.k)
    _column(f"{field}.top_values", value.top_values, 4, positions * value.k)


# --- front end -> daemon -------------------------------------------------------------------------------------------


def check_connect(msg: m.Connect, limits: Limits) -> None:
    """A name that can stand in logs and in the journal."""
    _text("frontend", msg.frontend, limits.frontend_name_bytes_max, empty=False)
    if not msg.frontend.isprintable():
        _fail("text", "frontend", "the name has characters that cannot be printed")
    _text("process", msg.process, limits.frontend_name_bytes_max)
    _range("attempt", msg.attempt, 0, INT64_MAX)


def check_generate(msg: m.Generate, limits: Limits) -> None:
    """Also used by the client before it sends: what passes here is never answered with a lost connection."""
    _text("id", msg.id, limits.id_bytes_max, empty=False)
    try:
        _column("prompt", msg.prompt, 8, rows_max=limits.prompt_tokens_max)
        _sampling(msg.sampling)
        if msg.max_tokens is not None:
            _range("max_tokens", msg.max_tokens, 0, INT32_MAX)
        _range("min_tokens", msg.min_tokens, 0, INT32_MAX)
        _column("stop_ids", msg.stop_ids, 8, rows_max=limits.stop_ids_max)
        _range("n", msg.n, 1, limits.choices_max)
        _range("priority", msg.priority, -INT64_MAX - 1, INT64_MAX)
        _range("deadline_ms", msg.deadline_ms, 0, INT64_MAX // 1_000_000)
        _text("namespace", msg.namespace, limits.namespace_bytes_max)
    except DecodeError as error:
        error.id = msg.id
        raise


def check_abort(msg: m.Abort, limits: Limits) -> None:
    """An id that a Generate could have had."""
    _text("id", msg.id, limits.id_bytes_max, empty=False)


def check_finish_at(msg: m.FinishAt, limits: Limits) -> None:
    """An id that a Generate could have had, and counts that fit."""
    _text("id", msg.id, limits.id_bytes_max, empty=False)
    _range("choice", msg.choice, 0, limits.choices_max - 1)
    _range("output_tokens", msg.output_tokens, 0, INT32_MAX)


def check_resume(msg: m.Resume, limits: Limits) -> None:
    """An id and choice that a Generate could have had, and no more tokens than a prompt can have."""
    _text("id", msg.id, limits.id_bytes_max, empty=False)
    _range("choice", msg.choice, 0, limits.choices_max - 1)
    _column("tokens", msg.tokens, 8, rows_max=limits.prompt_tokens_max)


def check_acknowledge(msg: m.Acknowledge, limits: Limits) -> None:
    """Not more ids than the limit, each of them possible."""
    if len(msg.ids) > limits.ids_per_acknowledge_max:
        _fail("too_long", "ids", f"{len(msg.ids)} ids, the limit is {limits.ids_per_acknowledge_max}")
    for id_ in msg.ids:
        _text("ids", id_, limits.id_bytes_max, empty=False)


def check_ask(msg: m.Ask, limits: Limits) -> None:
    """A short question with few options."""
    _text("what", msg.what, limits.id_bytes_max, empty=False)
    _range("ticket", msg.ticket, 0, INT64_MAX)
    if len(msg.options) > limits.ask_options_max:
        _fail("too_long", "options", f"{len(msg.options)} options, the limit is {limits.ask_options_max}")
    for name, value in msg.options.items():
        _text("options", name, limits.id_bytes_max, empty=False)
        _range(f"options.{name[:64]}", value, -INT64_MAX - 1, INT64_MAX)


# --- daemon -> front end -------------------------------------------------------------------------------------------


def check_welcome(msg: m.Welcome, limits: Limits) -> None:
    """Limits are counts."""
    for name, value in msg.limits.items():
        _range(f"limits.{name[:64]}", value, 0, INT64_MAX)


def check_accepted(msg: m.Accepted, limits: Limits) -> None:
    """Numbers of requests that can exist."""
    _range("first_request", msg.first_request, 1, INT64_MAX)
    _range("n", msg.n, 1, limits.choices_max)


def check_token_batch(msg: m.TokenBatch, limits: Limits) -> None:
    """Two columns of equal length."""
    rows = _column("requests", msg.requests, 8)
    _column("tokens", msg.tokens, 8, rows)
    for index, entry in enumerate(msg.logprobs):
        _logprobs(f"logprobs[{index}]", entry.values)


def check_finished(msg: m.Finished, limits: Limits) -> None:
    """Counts are not negative, and no more of a prompt was cached than known, nor known than it has."""
    _range("choice", msg.choice, 0, INT32_MAX)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        _range(name, getattr(msg, name), 0, INT32_MAX)
    _range("matched_tokens", msg.matched_tokens, msg.cached_tokens, msg.prompt_tokens)
    _text("hit_cut", msg.hit_cut, BAND_NAME_BYTES_MAX)


# --- daemon -> rank ------------------------------------------------------------------------------------------------


def check_hello(msg: m.Hello, limits: Limits) -> None:
    """An epoch that can be."""
    _range("epoch", msg.epoch, 1, INT64_MAX)


def check_begin(msg: m.Begin, limits: Limits) -> None:
    """An epoch that can be."""
    _range("epoch", msg.epoch, 1, INT64_MAX)


def _forward(forward: m.Forward) -> None:
    rows = _column("forward.rows", forward.rows, 4)
    _column("forward.generations", forward.generations, 4, rows)
    _column("forward.starts", forward.starts, 4, rows)
    _column("forward.counts", forward.counts, 4, rows)
    _column("forward.flags", forward.flags, 1, rows)
    _column("forward.tokens", forward.tokens, 8)
    entries = _column("forward.table_rows", forward.table_rows, 4)
    _column("forward.table_indexes", forward.table_indexes, 4, entries)
    _column("forward.table_pages", forward.table_pages, 4, entries)
    if forward.slots:  # none at all for a model without recurrent state
        _column("forward.slots", forward.slots, 4, rows)
    for entry in forward.sampling:
        _sampling(entry.sampling)
        _column("forward.sampling.banned", entry.banned, 8)
        _column("forward.sampling.prompt_ids", entry.prompt_ids, 8)
        _column("forward.sampling.output_ids", entry.output_ids, 8)


def _op(op: Op) -> None:
    if isinstance(op, Flush):
        _range("ops.moves_max", op.moves_max, 0, INT32_MAX)
        return
    if isinstance(op, Rebind | CopyState):
        _range("ops.band", op.band, 0, INT32_MAX)
        pairs = _column("ops.sources", op.sources, 4)
        _column("ops.targets", op.targets, 4, pairs)
        return
    if isinstance(op, Fix):
        _range("ops.use", op.use, 1, INT64_MAX)
        return
    rows: list[int] = []
    for part in op.parts:
        _range("ops.band", part.band, 0, INT32_MAX)
        rows.append(_column("ops.ids", part.ids, 4))
    if isinstance(op, UseOp):
        _range("ops.use", op.use, 1, INT64_MAX)
    if isinstance(op, Backup | Load):
        if len(op.slots) != len(rows):
            _fail("column", "ops.slots", f"{len(op.slots)} columns of host slots where {len(rows)} belong")
        for units, slots in zip(rows, op.slots, strict=True):
            _column("ops.slots", slots, 8, units)


def check_step(msg: m.Step, limits: Limits) -> None:
    """Columns of equal length, and a digest."""
    _range("epoch", msg.epoch, 1, INT64_MAX)
    _range("seq", msg.seq, 1, INT64_MAX)
    _range("processed_through", msg.processed_through, 0, msg.seq - 1)
    for use in msg.released:
        _range("released", use, 1, INT64_MAX)
    _digest("logical", msg.logical)
    for op in msg.ops:
        _op(op)
    if msg.forward is not None:
        _forward(msg.forward)


# --- rank -> daemon ------------------------------------------------------------------------------------------------


def check_rank(
    msg: m.Join | m.Ready | m.Heartbeat | m.Fault | m.Explained | m.Left | m.StandsBy, limits: Limits
) -> None:
    """A stage and a rank that can be."""
    _range("stage", msg.stage, 0, INT32_MAX)
    _range("rank", msg.rank, 0, INT32_MAX)


def check_ready(msg: m.Ready, limits: Limits) -> None:
    """Sizes that are not negative."""
    check_rank(msg, limits)
    _range("virtual_pages", msg.virtual_pages, 0, INT32_MAX)
    _range("virtual_slots", msg.virtual_slots, 0, INT32_MAX)
    _range("geometry.arena_bytes", msg.geometry.arena_bytes, 0, INT64_MAX)


def check_fault(msg: m.Fault, limits: Limits) -> None:
    """Texts that can be logged."""
    check_rank(msg, limits)
    _text("what", msg.what, TEXT_BYTES_MAX)
    _text("trace", msg.trace, TEXT_BYTES_MAX)


def check_report(msg: m.Report, limits: Limits) -> None:
    """Columns of equal length, and digests; `sampled` is empty except on the last stage."""
    _range("epoch", msg.epoch, 1, INT64_MAX)
    _range("seq", msg.seq, 1, INT64_MAX)
    _range("stage", msg.stage, 0, INT32_MAX)
    _range("rank", msg.rank, 0, INT32_MAX)
    rows = _column("rows", msg.rows, 4)
    _column("generations", msg.generations, 4, rows)
    _column("tokens", msg.tokens, 8, rows)
    _digest("logical", msg.logical)
    _digest("layout", msg.layout)
    _digest("sampled", msg.sampled, may_be_empty=True)
    _column("bands", msg.bands, 16)
    _column("effects", msg.effects, 4)
    for entry in msg.logprobs:
        _logprobs("logprobs", entry.values)


def check_continued(msg: m.Continued, limits: Limits) -> None:
    """A column of tokens behind a position, and their log probabilities."""
    _text("id", msg.id, limits.id_bytes_max, empty=False)
    _range("choice", msg.choice, 0, limits.choices_max - 1)
    _range("output_tokens", msg.output_tokens, 0, INT32_MAX)
    _column("tokens", msg.tokens, 8)
    for entry in msg.logprobs:
        _logprobs("logprobs", entry.values)


def check_explain(msg: m.Explain, limits: Limits) -> None:
    """A step's number."""
    _range("seq", msg.seq, 1, INT64_MAX)


def check_explained(msg: m.Explained, limits: Limits) -> None:
    """A rank, and steps with whole digests."""
    check_rank(msg, limits)
    for step in msg.steps:
        _range("seq", step.seq, 1, INT64_MAX)
        _digest("logical", step.logical)
        _digest("layout", step.layout)


CHECKS: dict[type, Callable[[Any, Limits], None]] = {
    m.Connect: check_connect,
    m.Generate: check_generate,
    m.Abort: check_abort,
    m.FinishAt: check_finish_at,
    m.Resume: check_resume,
    m.Acknowledge: check_acknowledge,
    m.Ask: check_ask,
    m.Welcome: check_welcome,
    m.Accepted: check_accepted,
    m.TokenBatch: check_token_batch,
    m.Finished: check_finished,
    m.Continued: check_continued,
    m.Hello: check_hello,
    m.Begin: check_begin,
    m.Step: check_step,
    m.Explain: check_explain,
    m.Join: check_rank,
    m.Ready: check_ready,
    m.Report: check_report,
    m.Explained: check_explained,
    m.Fault: check_fault,
    m.Heartbeat: check_rank,
    m.Left: check_rank,
    m.StandsBy: check_rank,
}
