"""The commands: exit codes, tables and JSON of `replay check`, `replay until` and `verify`; none changes a file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from journal import records
from journal.opening import open_journal
from journal.reader import Record, read_records
from journal.records import Kind
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.helpers import ID, opened
from tests.journal.modeled_disk import ModeledDisk
from tests.journal.world import World
from tools import replay, verify


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A run directory whose journal is that of a daemon killed in mid-load."""
    world = World(DiskStorage(tmp_path / "journal"), 2)
    for _ in range(40):
        world.iterate()
    assert world.core.gauges()["live"] > 0
    world.writer._storage.unlock()
    return tmp_path


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_check_reproduces(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed daemon's journal is reproduced from its run directory; exit code 0, one line says what was compared."""
    before = contents(journal)
    assert replay.main(["check", str(journal)]) == 0
    assert capsys.readouterr().out.startswith("reproduced: ")
    assert replay.main(["check", str(journal / "journal"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reproduced"]
    assert result["steps"] > 10
    assert result["divergence"] is None
    assert contents(journal) == before


def test_check_shows_the_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A false decision gives exit code 1, and both sides with place and request, as text and as JSON."""
    disk = ModeledDisk()
    world = World(disk, 2)
    for _ in range(40):
        world.iterate()
    rewrite(list(read_records(disk)), tmp_path / "journal")
    assert replay.main(["check", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    for part in ("DIVERGED", "recorded:", "replayed:", "first difference:", "request", "sequence"):
        assert part in shown
    assert replay.main(["check", str(tmp_path), "--json"]) == 1
    divergence = json.loads(capsys.readouterr().out)["divergence"]
    assert "'false'" in divergence["path"]
    assert divergence["request"] > 0


def rewrite(found: list[Record], directory: Path) -> None:
    """The same records with one decision changed, soundly framed."""
    writer, _ = open_journal(DiskStorage(directory), JournalSettings(), ID)
    place = [at for at, record in enumerate(found) if record.kind == Kind.DECIDED][4]
    for at, record in enumerate(found):
        payload = record.payload
        if at == place:
            payload = records.encode(msgspec.structs.replace(record.decode(), reason="false"))
        writer.append_encoded(Kind(record.kind), payload)
    writer.close()


def test_until_shows_the_state(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Core, requests and arena behind a record, as tables and as JSON."""
    sequence = [record.sequence for record in read_records(DiskStorage(journal / "journal"))][-3]
    assert replay.main(["until", str(sequence), str(journal)]) == 0
    shown = capsys.readouterr().out
    assert f"behind sequence {sequence}:" in shown
    for part in ("requests", "arena of stage 0", "arena of stage 1", "live", "hole", "pending", "beyond"):
        assert part in shown
    assert replay.main(["until", str(sequence), str(journal), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert state["sequence"] == sequence
    assert state["epoch"] == 1
    assert [bands[0]["band"] for bands in state["stages"]] == ["full", "full"]
    assert state["core"]["gauges"]["live"] == len(state["core"]["requests"])
    assert state["stages"][0][0]["live"] > 0


def test_verify_names_what_was_cut(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that an opening kept beside are named, as text and as JSON; the journal is sound."""
    last = max((journal / "journal").glob("*.kvj"))
    last.write_bytes(last.read_bytes() + bytes(5))
    writer, _ = open_journal(DiskStorage(journal / "journal"), JournalSettings(), ID)
    writer.append_encoded(Kind.OPENED, records.encode(opened()))
    writer.close()
    (kept,) = (journal / "journal").glob("*.cut")
    assert verify.main([str(journal)]) == 0
    assert f"kept beside: {kept.name}" in capsys.readouterr().out
    assert verify.main([str(journal), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cut"] == [kept.name]


def test_verify_reads_only_checksums(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound journal gives exit code 0 and its counts; a changed byte in it 4, with the place and what is sound on."""
    before = contents(journal)
    assert verify.main([str(journal), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sound"]
    assert result["records"] == result["last_sequence"] == sum(result["kinds"].values())
    assert contents(journal) == before
    segment = journal / "journal" / "0000000001.kvj"
    data = bytearray(segment.read_bytes())
    data[400] ^= 1
    segment.write_bytes(data)
    assert verify.main([str(journal)]) == 4
    shown = capsys.readouterr().out
    assert "DAMAGED" in shown
    assert "refuse" in shown


def test_torn_tail_is_sound(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What opening would cut is told, and is no damage."""
    segment = journal / "journal" / "0000000001.kvj"
    segment.write_bytes(segment.read_bytes()[:-5])
    assert verify.main([str(journal)]) == 0
    assert "cut_torn" in capsys.readouterr().out
    assert replay.main(["check", str(journal)]) == 0


def test_damaged_journal_is_not_replayed(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replay stops at damage with its own exit code and says where it is."""
    segment = journal / "journal" / "0000000001.kvj"
    data = bytearray(segment.read_bytes())
    data[400] ^= 1
    segment.write_bytes(data)
    assert replay.main(["check", str(journal)]) == 4
    assert "0000000001.kvj at byte" in capsys.readouterr().err


def test_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without segments is a usage error that names it."""
    for main, arguments in ((replay.main, ["check"]), (replay.main, ["until", "3"]), (verify.main, [])):
        assert main([*arguments, str(tmp_path)]) == 2
        assert str(tmp_path) in capsys.readouterr().err


def test_random_bytes_under_a_journal_s_name_are_no_sound_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes of damage, whatever reads it; a header that was torn while it was written is still a sound start."""
    (tmp_path / "0000000001.kvj").write_bytes(random.Random(1).randbytes(100_000))
    assert verify.main([str(tmp_path)]) == 4
    assert replay.main(["check", str(tmp_path)]) == 4
    assert replay.main(["until", "3", str(tmp_path), "--json"]) == 4
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("nothing of it is a journal's: 0000000001.kvj at byte 0") == 3
    (tmp_path / "0000000001.kvj").write_bytes(bytes(7))
    assert verify.main([str(tmp_path)]) == 0
