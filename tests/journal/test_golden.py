"""What was released stays readable: the record schema is locked, and old journals replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from journal.reader import Walk, read_records
from journal.records import INPUT_KINDS, KIND_OF, PAYLOADS, Kind
from journal.storage import DiskStorage
from tests.golden.make import HERE, SCHEMA_LOCK, make_journal, schema_text
from tools.replay import replay_directory
from tools.verify import verify

JOURNALS = sorted(path for path in HERE.glob("v*") if path.is_dir())


def test_schema_is_locked() -> None:
    """Kinds, fields, their order, types and defaults are as locked; `python -m tests.golden.make` renews the lock."""
    assert schema_text() == SCHEMA_LOCK.read_text()


def test_kind_numbers_have_their_ranges() -> None:
    """Inputs are 16 to 63, outputs 64 to 95, checks and the rest above; every kind has one payload type of its own."""
    assert set(PAYLOADS) == set(Kind)
    assert len(KIND_OF) == len(PAYLOADS)
    assert {kind for kind in Kind if 16 <= kind < 64} == INPUT_KINDS
    assert {kind for kind in Kind if 64 <= kind < 96} == {Kind.STEPPED, Kind.DECIDED}


@pytest.mark.parametrize("directory", JOURNALS, ids=lambda path: path.name)
def test_golden_journal_replays(directory: Path) -> None:
    """Every decision, step and digest of a golden journal is reproduced by this version."""
    verdict = replay_directory(str(directory))
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.lives == 2
    assert verdict.counts.steps > 10
    assert verdict.counts.decisions > 10


@pytest.mark.parametrize("directory", JOURNALS, ids=lambda path: path.name)
def test_golden_journal_is_sound(directory: Path) -> None:
    """Plain and compressed segments are read alike; the first life's torn record was cut and lies beside."""
    result = verify(str(directory))
    assert result["sound"]
    assert result["closed"]
    assert {found["rule"] for found in result["findings"]} <= {"clean_end", "superseded_tail"}
    suffixes = {path.suffix for path in directory.iterdir()}
    assert suffixes == {".kvj", ".zst", ".cut"}


def test_golden_journal_can_be_made_again(tmp_path: Path) -> None:
    """The maker is deterministic: the same records, byte for byte, as those checked in."""
    make_journal(tmp_path / "again")
    again = [(record.kind, record.payload) for record in read_records(DiskStorage(tmp_path / "again"))]
    present = Walk(DiskStorage(JOURNALS[-1]))
    assert again == [(record.kind, record.payload) for record in present.records()]
