"""Recovery: what is done about each way in which a journal on disk can differ from one that ended in order.

Owns the table. Must never touch a file: it judges a `Case`, the reader makes cases, `repair` in the writer's opening
acts on the verdicts. Invariants: the first row that matches decides; every case matches a row; only the last segment
is ever cut, and only where nothing that was known on disk can be lost.

A frame says how far the journal was known on disk when it was appended. A sound frame behind the damage that was
appended after the damaged place had been synced (`promised`) proves corruption, and so does a sound `Closed`, which is
written when everything before it is on disk. If there is neither, the damage is a write that the machine lost before it
was synced, out of order with later ones, and what lies behind it was not synced either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Decision(StrEnum):
    """What a row of the table does."""

    ACCEPT = "accept"  # read on
    SKIP = "skip"  # pass over these bytes
    CUT_TORN = "cut_torn"  # the journal ends here; keep the rest beside and cut the file
    REFUSE = "refuse"  # do not start; say where, and what is sound on both sides


class Condition(StrEnum):
    """What was met while reading."""

    END = "end"  # the file ends behind a whole frame
    SHORT_HEADER = "short_header"  # fewer bytes left than a header has
    SHORT_PAYLOAD = "short_payload"  # fewer bytes left than the header says
    BAD_FRAME = "bad_frame"  # wrong magic, length, CRC or padding
    LINK_MISMATCH = "link_mismatch"  # a sound frame that names another predecessor
    SEQUENCE_GAP = "sequence_gap"  # a sound frame with another number than the next
    SUPERSEDED = "superseded"  # bytes behind those that the next segment's header names
    AFTER_FOOTER = "after_footer"  # bytes behind `Closed` in its segment
    UNKNOWN_KIND = "unknown_kind"  # a sound frame of a kind this version does not know
    TRIMMED = "trimmed"  # the row of files begins above 1, at or before what a snapshot covers
    SEGMENT_MISSING = "segment_missing"  # a number is missing in the row of files
    PREDECESSOR_MISMATCH = "predecessor_mismatch"  # the file before is not the one this header names
    NEWER_FORMAT = "newer_format"  # a format whose major version is above ours
    OTHER_JOURNAL = "other_journal"  # another journal's id in the header
    BAD_ARCHIVE = "bad_archive"  # a compressed segment that does not decompress


@dataclass(frozen=True, slots=True)
class Case:
    """One condition with the facts that decide about it."""

    condition: Condition
    last: bool = False  # in the last segment of the journal
    sound_behind: bool = False  # a whole, plausible frame follows
    promised: bool = False  # ... and was appended after this place had been synced
    closed_behind: bool = False  # ... and one that follows is `Closed`, which is written last, behind a sync
    may_skip: bool = False  # the frame's own flag


@dataclass(frozen=True, slots=True)
class Row:
    """A rule: it matches when the condition is among `conditions` and every fact that is not None agrees."""

    label: str
    conditions: tuple[Condition, ...]
    decision: Decision
    text: str
    last: bool | None = None
    sound_behind: bool | None = None
    promised: bool | None = None
    closed_behind: bool | None = None
    may_skip: bool | None = None

    def matches(self, case: Case) -> bool:
        """Whether this row is about the case."""
        if case.condition not in self.conditions:
            return False
        facts = ("last", "sound_behind", "promised", "closed_behind", "may_skip")
        return all(getattr(self, fact) in (None, getattr(case, fact)) for fact in facts)


C = Condition
DAMAGE = (C.SHORT_HEADER, C.SHORT_PAYLOAD, C.BAD_FRAME)

TABLE: tuple[Row, ...] = (
    Row("clean_end", (C.END,), Decision.ACCEPT, "the segment ends behind a whole record"),
    Row("superseded_tail", (C.SUPERSEDED,), Decision.SKIP, "never synced, and written again in the next segment"),
    Row("damaged_inside", DAMAGE, Decision.REFUSE, "damage in a finished segment", last=False),
    Row(
        "short_header",
        (C.SHORT_HEADER,),
        Decision.CUT_TORN,
        "torn within a frame header",
        last=True,
        sound_behind=False,
    ),
    Row(
        "short_payload",
        (C.SHORT_PAYLOAD,),
        Decision.CUT_TORN,
        "torn within a payload",
        last=True,
        sound_behind=False,
    ),
    Row(
        "bad_tail",
        (C.BAD_FRAME,),
        Decision.CUT_TORN,
        "a bad frame with nothing sound behind it",
        last=True,
        sound_behind=False,
    ),
    Row(
        "bad_inside",
        DAMAGE,
        Decision.REFUSE,
        "damage to records that were on disk: sound records follow that were written after these had been synced",
        last=True,
        sound_behind=True,
        promised=True,
    ),
    Row(
        "closed_damaged",
        DAMAGE,
        Decision.REFUSE,
        "damage in a life that was closed in order: its last record, written behind a sync of the rest, is sound",
        last=True,
        sound_behind=True,
        closed_behind=True,
    ),
    Row(
        "lost_write",
        DAMAGE,
        Decision.CUT_TORN,
        "a lost write: records follow, but none was written after this place had been synced",
        last=True,
        sound_behind=True,
        promised=False,
    ),
    Row("link_mismatch", (C.LINK_MISMATCH,), Decision.REFUSE, "a record that names another predecessor"),
    Row("sequence_gap", (C.SEQUENCE_GAP,), Decision.REFUSE, "records are missing, or stand twice"),
    Row("after_footer", (C.AFTER_FOOTER,), Decision.REFUSE, "bytes behind the footer of a life that was closed"),
    Row(
        "unknown_skippable", (C.UNKNOWN_KIND,), Decision.SKIP, "a record of a later version, not needed", may_skip=True
    ),
    Row(
        "unknown_needed",
        (C.UNKNOWN_KIND,),
        Decision.REFUSE,
        "a record that only a later version can read",
        may_skip=False,
    ),
    Row("trimmed", (C.TRIMMED,), Decision.ACCEPT, "what is older than a snapshot was trimmed"),
    Row("segment_missing", (C.SEGMENT_MISSING,), Decision.REFUSE, "a segment file is missing"),
    Row("predecessor_mismatch", (C.PREDECESSOR_MISMATCH,), Decision.REFUSE, "the segment before is not the one named"),
    Row("newer_format", (C.NEWER_FORMAT,), Decision.REFUSE, "written in a newer format"),
    Row("other_journal", (C.OTHER_JOURNAL,), Decision.REFUSE, "a segment of another journal"),
    Row("bad_archive", (C.BAD_ARCHIVE,), Decision.REFUSE, "a compressed segment cannot be decompressed"),
)

assert len({row.label for row in TABLE}) == len(TABLE), "a label stands twice in the recovery table"
assert all(row.last for row in TABLE if row.decision is Decision.CUT_TORN), "only the last segment is ever cut"


def judge(case: Case) -> Row:
    """The first row of the table that is about the case."""
    assert case.sound_behind or not (case.promised or case.closed_behind), "only sound frames promise, or close"
    for row in TABLE:
        if row.matches(case):
            return row
    raise AssertionError(f"no row of the recovery table is about {case}")
