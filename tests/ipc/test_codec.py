"""The codec: every message survives the way there and back; any other byte string is a DecodeError and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.columns import pack_i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.ops import Backup, CopyState, Fix, Flush, Free, Hold, Load, Op, Part, Publish, Rebind, Send, Take
from ipc import codec
from ipc import messages as m
from ipc.checks import CHECKS
from ipc.errors import DecodeError
from ipc.handshake import Limits, version_problem
from journal.records import PAYLOADS, Kind

DIGEST = bytes(range(16))
FACTS = m.ModelFacts("m", "llama", 1000, 4096, "float32", [2])
STAGE = StageGeometry(1 << 20, 64, [BandGeometry("full", "full", 64)])
SETTINGS = m.RankSettings("m", "m", "float32", 16, 4, 64, 0, 0, 500_000)
VALUES = m.Logprobs(2, bytes(4), bytes(4), bytes(16), bytes(8))
FORWARD = m.Forward(
    pack_i32([0, 1]),
    pack_i32([1, 1]),
    pack_i32([0, 5]),
    pack_i32([3, 1]),
    b"\x03\x01",
    pack_i64([7, 8, 9]),
    pack_i32([0]),
    pack_i32([0]),
    pack_i32([1]),
    [m.RowSampling(0, 1, m.Sampling(seed=3), 0)],
)
STEP = m.Step(1, 2, 0, 1, [], [Take([Part(0, pack_i32([1]))]), Free([Part(0, b"")]), Flush(4)], FORWARD, DIGEST)
PAGES = [Part(0, pack_i32([1, 2]))]
SLOTS = [pack_i64([7, 8])]
USES: list[Op] = [
    Rebind(0, pack_i32([1]), pack_i32([2])),
    CopyState(0, pack_i32([1]), pack_i32([2])),
    Backup(1, PAGES, SLOTS),
    Load(2, PAGES, SLOTS),
    Hold(3, PAGES),
    Send(4, PAGES),
    Publish(3, PAGES),
    Fix(4),
]
REPORT = m.Report(1, 2, 0, 0, pack_i32([0]), pack_i32([1]), pack_i64([5]), DIGEST, DIGEST, b"", [], 9, bytes(16))

EXAMPLES: dict[Callable[[bytes], Any], list[Any]] = {
    codec.from_frontend: [
        m.Connect("fe"),
        m.Generate("a", pack_i64([1, 2]), m.Sampling(seed=-5, top_k=3), 8, stop_ids=pack_i64([2]), n=2, priority=-1),
        m.Abort("a"),
        m.FinishAt("a", 0, 3),
        m.Resume("a", 1, bytes(24)),
        m.Acknowledge(["a", "b"]),
        m.Ask("status", 3, {"x": -1}),
    ],
    codec.to_frontend: [
        m.Welcome(1, FACTS, {"a": 1}, "life"),
        m.Rejected("code", "text"),
        m.Accepted("a", 1, 2, 3, -4),
        m.Refused("a", "code", "text", "field", 1, 2, 3),
        m.TokenBatch(1, pack_i64([1]), pack_i64([2]), [m.RequestLogprobs(1, -1, VALUES)]),
        m.Finished("a", 0, 1, "stop", "", 5, 2, 3, 4, "window:64"),
        m.Continued("a", 0, 1, 3, pack_i64([5]), [m.RequestLogprobs(1, -1, VALUES)]),
        m.Answer(1, True, "{}"),
    ],
    codec.to_rank: [
        m.Hello(1, SETTINGS),
        m.Begin(1, Geometry(16, 8, 4, [STAGE])),
        STEP,
        m.Step(1, 3, 0, 1, [1, 2], USES, None, DIGEST),
        m.Explain(3),
        m.Stop("why"),
    ],
    codec.from_rank: [
        m.Join(0, 0, 1, "token"),
        m.Ready(0, 0, STAGE, 8, 4, FACTS, {"torch": "2"}, ["line"]),
        REPORT,
        m.Explained(0, 0, [m.StepTrace(3, DIGEST, DIGEST, [m.OpTrace(0, "Take", "full", "pages 1..2 at 5..6")])]),
        m.Fault(0, 0, 3, "what", "trace"),
        m.Heartbeat(0, 0, 2, 1),
        m.Left(0, 1, True),
        m.StandsBy(0, 1, "token"),
    ],
}
PAIRS = [(decode, message) for decode, messages in EXAMPLES.items() for message in messages]
UNIONS = {
    codec.from_frontend: m.FromFrontEnd,
    codec.to_frontend: m.ToFrontEnd,
    codec.to_rank: m.ToRank,
    codec.from_rank: m.FromRank,
}


@pytest.mark.parametrize(("decode", "message"), PAIRS, ids=lambda value: type(value).__name__)
def test_every_message_survives_the_way_there_and_back(decode: Callable[[bytes], Any], message: Any) -> None:
    """Equal after decoding, and equal bytes when encoded again."""
    data = codec.encode(message)
    again = decode(data)
    assert again == message
    assert codec.encode(again) == data


def test_the_examples_cover_every_message_of_every_direction() -> None:
    """A new message cannot be forgotten here, nor a check be left for one that does not exist."""
    for decode, union in UNIONS.items():
        assert {type(message) for message in EXAMPLES[decode]} == set(get_args(union))
    assert set(CHECKS) <= {type(message) for _, message in PAIRS}


def test_a_message_of_another_direction_is_refused() -> None:
    """A rank's report is no front end's message, whoever sends it."""
    for decode in EXAMPLES:
        for other, message in PAIRS:
            if other is not decode and type(message) not in {type(mine) for mine in EXAMPLES[decode]}:
                with pytest.raises(DecodeError) as caught:
                    decode(codec.encode(message))
                assert caught.value.code == "invalid"


def replace(message: Any, **fields: Any) -> Any:
    """The message with some fields replaced."""
    return msgspec.structs.replace(message, **fields)


GENERATE = EXAMPLES[codec.from_frontend][1]
BAD: list[tuple[Callable[[bytes], Any], Any, str, str]] = [
    (codec.from_frontend, m.Connect("x" * 129), "too_long", "frontend"),
    (codec.from_frontend, m.Connect("\x1b[31m"), "text", "frontend"),
    (codec.from_frontend, replace(GENERATE, id=""), "empty", "id"),
    (codec.from_frontend, replace(GENERATE, id="\u20ac" * 86), "too_long", "id"),
    (codec.from_frontend, replace(GENERATE, prompt=bytes(9)), "column", "prompt"),
    (codec.from_frontend, replace(GENERATE, stop_ids=bytes(8 * 1025)), "too_long", "stop_ids"),
    (codec.from_frontend, replace(GENERATE, n=0), "out_of_range", "n"),
    (codec.from_frontend, replace(GENERATE, n=2**40), "out_of_range", "n"),
    (codec.from_frontend, replace(GENERATE, max_tokens=2**31), "out_of_range", "max_tokens"),
    (codec.from_frontend, replace(GENERATE, min_tokens=-1), "out_of_range", "min_tokens"),
    (codec.from_frontend, replace(GENERATE, priority=2**63), "out_of_range", "priority"),
    (codec.from_frontend, replace(GENERATE, deadline_ms=2**62), "out_of_range", "deadline_ms"),
    (codec.from_frontend, replace(GENERATE, namespace="n" * 257), "too_long", "namespace"),
    (codec.from_frontend, replace(GENERATE, sampling=m.Sampling(temperature=math.inf)), "not_finite", "temperature"),
    (codec.from_frontend, replace(GENERATE, sampling=m.Sampling(min_p=math.nan)), "not_finite", "min_p"),
    (codec.from_frontend, replace(GENERATE, sampling=m.Sampling(seed=2**64 - 1)), "out_of_range", "seed"),
    (codec.from_frontend, replace(GENERATE, sampling=m.Sampling(top_k=-2)), "out_of_range", "top_k"),
    (codec.from_frontend, replace(GENERATE, sampling=m.Sampling(logprobs=2**20)), "out_of_range", "logprobs"),
    (codec.from_frontend, m.FinishAt("a", -1, 3), "out_of_range", "choice"),
    (codec.from_frontend, m.FinishAt("a", 0, 2**31), "out_of_range", "output_tokens"),
    (codec.from_frontend, m.Resume("a", 0, b"short"), "column", "tokens"),
    (codec.from_frontend, m.Resume("a", 0, bytes(8 * ((1 << 20) + 1))), "too_long", "tokens"),
    (codec.from_frontend, m.Acknowledge(["a"] * 4097), "too_long", "ids"),
    (codec.from_frontend, m.Acknowledge([""]), "empty", "ids"),
    (codec.from_frontend, m.Ask("status", -1), "out_of_range", "ticket"),
    (codec.from_frontend, m.Ask("status", 1, {str(k): k for k in range(33)}), "too_long", "options"),
    (codec.from_frontend, m.Ask("status", 1, {"x": 2**63}), "out_of_range", "options.x"),
    (codec.to_frontend, m.TokenBatch(1, bytes(8), bytes(16)), "column", "tokens"),
    (codec.to_frontend, m.Accepted("a", 0, 1, 1, 1), "out_of_range", "first_request"),
    (codec.to_frontend, m.Finished("a", 0, 1, "stop", "", -1, 2), "out_of_range", "prompt_tokens"),
    (codec.to_frontend, m.Finished("a", 0, 1, "stop", "", 8, 2, 4, 3), "out_of_range", "matched_tokens"),
    (codec.to_frontend, m.Finished("a", 0, 1, "stop", "", 8, 2, 4, 9), "out_of_range", "matched_tokens"),
    (codec.to_frontend, m.Finished("a", 0, 1, "stop", "", 8, 2, 4, 4, "x" * 65), "too_long", "hit_cut"),
    (
        codec.to_frontend,
        m.TokenBatch(1, b"", b"", [m.RequestLogprobs(1, -1, replace(VALUES, top_ids=bytes(8)))]),
        "column",
        "logprobs[0].top_ids",
    ),
    (codec.to_rank, replace(STEP, seq=0), "out_of_range", "seq"),
    (codec.to_rank, replace(STEP, processed_through=2), "out_of_range", "processed_through"),
    (codec.to_rank, replace(STEP, logical=b""), "digest", "logical"),
    (codec.to_rank, replace(STEP, ops=[Free([Part(0, b"abc")])]), "column", "ops.ids"),
    (codec.to_rank, replace(STEP, ops=[Flush(-1)]), "out_of_range", "ops.moves_max"),
    (codec.to_rank, replace(STEP, ops=[Rebind(0, pack_i32([1]), b"")]), "column", "ops.targets"),
    (codec.to_rank, replace(STEP, ops=[CopyState(-1, b"", b"")]), "out_of_range", "ops.band"),
    (codec.to_rank, replace(STEP, ops=[CopyState(0, b"abc", b"")]), "column", "ops.sources"),
    (codec.to_rank, replace(STEP, ops=[Hold(0, PAGES)]), "out_of_range", "ops.use"),
    (codec.to_rank, replace(STEP, ops=[Publish(2**63, PAGES)]), "out_of_range", "ops.use"),
    (codec.to_rank, replace(STEP, ops=[Fix(0)]), "out_of_range", "ops.use"),
    (codec.to_rank, replace(STEP, ops=[Send(1, [Part(0, b"abc")])]), "column", "ops.ids"),
    (codec.to_rank, replace(STEP, ops=[Backup(1, PAGES, [])]), "column", "ops.slots"),
    (codec.to_rank, replace(STEP, ops=[Load(1, PAGES, [pack_i64([7])])]), "column", "ops.slots"),
    (codec.to_rank, replace(STEP, released=[0]), "out_of_range", "released"),
    (codec.to_rank, replace(STEP, forward=replace(FORWARD, flags=b"\x01")), "column", "forward.flags"),
    (codec.to_rank, replace(STEP, forward=replace(FORWARD, table_pages=b"")), "column", "forward.table_pages"),
    (codec.to_rank, replace(STEP, forward=replace(FORWARD, slots=bytes(3))), "column", "forward.slots"),
    (codec.from_rank, replace(REPORT, tokens=b""), "column", "tokens"),
    (codec.from_rank, replace(REPORT, rank=-1), "out_of_range", "rank"),
    (codec.from_rank, replace(REPORT, layout=bytes(15)), "digest", "layout"),
    (codec.from_rank, replace(REPORT, bands=bytes(17)), "column", "bands"),
    (codec.from_rank, m.Join(-1, 0, 1, "t"), "out_of_range", "stage"),
]


@pytest.mark.parametrize(
    ("decode", "message", "code", "field"), BAD, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_what_types_do_not_catch_is_refused_by_name(
    decode: Callable[[bytes], Any], message: Any, code: str, field: str
) -> None:
    """Lengths, ranges, digests and texts, each with the field at fault; a request's refusal names the request."""
    with pytest.raises(DecodeError) as caught:
        decode(codec.encode(message))
    assert (caught.value.code, caught.value.field) == (code, field)
    if isinstance(message, m.Generate) and field != "id":
        assert caught.value.id == "a"


TRAPS = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "an array said to have 2**32 entries": b"\x92\xabAcknowledge\xdd\xff\xff\xff\xff",
    "a map said to have 2**32 entries": b"\x94\xa3Ask\xa1a\x00\xdf\xff\xff\xff\xff",
    "a text said to have 2**32 bytes": b"\x92\xa5Abort\xdb\xff\xff\xff\xff",
    "nested a million deep": b"\x93\xa5Abort\xa1a" + b"\x91" * 1_000_000 + b"\xc0",
    "broken utf-8": b"\x92\xa5Abort\xa2\xff\xfe",
    "trailing bytes": codec.encode(m.Abort("a")) + b"\x00",
    "an unknown tag": b"\x92\xa5Abort2\xa1a",
    "no array": b"\x80",
}


@pytest.mark.parametrize("data", TRAPS.values(), ids=TRAPS.keys())
def test_traps_are_decode_errors(data: bytes) -> None:
    """In no direction do such bytes raise anything else, nor allocate what they claim."""
    for decode in EXAMPLES:
        with pytest.raises(DecodeError) as caught:
            decode(data)
        assert caught.value.code in ("malformed", "invalid")


def test_a_message_over_the_size_limit_is_not_even_parsed() -> None:
    """The limit is on bytes, and the number is in the text."""
    data = codec.encode(m.Generate("a", bytes(8 * 100), m.Sampling()))
    with pytest.raises(DecodeError, match=rf"{len(data)} bytes, the limit is 100") as caught:
        codec.from_frontend(data, Limits(message_bytes_max=100))
    assert caught.value.code == "oversized"


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_decode_error(data: bytes) -> None:
    """In every direction."""
    for decode in EXAMPLES:
        try:
            message = decode(data)
        except DecodeError:
            continue
        assert codec.encode(message)


def test_every_cut_and_every_flipped_byte_of_every_message() -> None:
    """Exhaustively: each decodes to a message of the direction or raises DecodeError."""
    rng = random.Random(1)
    for decode, message in PAIRS:
        data = codec.encode(message)
        for place in range(len(data)):
            with pytest.raises(DecodeError):
                decode(data[:place])
            flipped = data[:place] + bytes([data[place] ^ rng.randrange(1, 256)]) + data[place + 1 :]
            assert outcome_of(decode, flipped) is None or isinstance(decode(flipped), UNIONS[decode])


def outcome_of(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """The message, or None for a DecodeError with a code and a text."""
    try:
        return decode(data)
    except DecodeError as error:
        return None if error.code and error.text else error


def test_a_steps_bytes_are_the_journals_payload() -> None:
    """One encoding: the journal decodes what was sent to the ranks."""
    assert msgspec.msgpack.decode(codec.encode(STEP), type=PAYLOADS[Kind.STEPPED]) == STEP


def test_limits_survive_the_handshake() -> None:
    """As a dictionary and back, with unknown names ignored and missing ones at their default."""
    limits = Limits(message_bytes_max=5, frontends_max=6)
    assert Limits.from_dict(limits.as_dict() | {"of_the_future": 1}) == limits
    assert Limits.from_dict({}) == Limits()


def test_versions() -> None:
    """The present one is understood, another is named in a sentence with both numbers."""
    assert version_problem(m.PROTOCOL_VERSION, "x") == ""
    assert version_problem(99, "front end x") == (
        "front end x speaks protocol version 99, this process understands 2: run both from one release"
    )


def test_a_version_has_its_messages() -> None:
    """One that came or went is read by no peer of the version before: with it goes another number."""
    names = {
        kind.__name__ for union in (m.FromFrontEnd, m.ToFrontEnd, m.ToRank, m.FromRank) for kind in get_args(union)
    }
    assert {m.PROTOCOL_VERSION: " ".join(sorted(names))} == {
        2: "Abort Accepted Acknowledge Answer Ask Begin Connect Continued Explain Explained Fault FinishAt Finished "
        "Generate Heartbeat Hello Join Left Ready Refused Rejected Report Resume StandsBy Step Stop TokenBatch Welcome"
    }
