"""Trim: what goes is proved not to be needed; on any doubt everything stays; it can be interrupted anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.recovery import recover
from journal import segment, snapshots
from journal.archive import compress_segments
from journal.errors import JournalDamaged
from journal.opening import open_journal
from journal.segment import segment_names
from journal.snapshots import decode_body, encode_body, snapshot_names
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.helpers import ID
from tests.journal.world import World
from tools import ends, replay, trim, verify
from tools.accounts import command as accounts
from tools.why import command as why

SMALL = JournalSettings(segment_bytes=12 << 10)
EVERY_BYTES = 18_000


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """A journal with more snapshots than are kept, whose daemon still writes."""
    directory = tmp_path_factory.mktemp("lived")
    world = World(DiskStorage(directory), 3, "a", SMALL, snapshot_bytes=EVERY_BYTES)
    while world.keeper.written < 4 or world.keeper.complete:
        world.iterate()
    for _ in range(5):
        world.iterate()
    world.writer.sync()
    return directory, world


@pytest.fixture
def journal(lived: tuple[Path, World], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(lived[0], tmp_path / "journal"))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check(directory: Path, *options: str) -> int:
    return replay.main(["check", str(directory), *options])


def snapshot_paths(directory: Path) -> list[Path]:
    """The two snapshots, older first."""
    return [directory / name for name in snapshot_names(sorted(files(directory))).values()]


def goes_on_as(directory: Path, world: World) -> None:
    """A life that opens the journal finds what the world's core knew."""
    writer, found = open_journal(DiskStorage(directory), SMALL, ID)
    recovery = recover(writer.storage, found)
    writer.storage.unlock()
    assert recovery.groups == world.core.recoverable()
    assert recovery.next_request == world.core.next_request
    assert recovery.notes == []


def test_what_two_snapshots_prove_goes(
    journal: Path, lived: tuple[Path, World], capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments before the older one, and nothing else; what is left verifies, replays from there, and opens."""
    before = files(journal)
    assert trim.main([str(journal), "--json"]) == ends.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["trimmed"]
    assert len(told["segments"]) >= 2
    assert set(before) - set(files(journal)) == set(told["segments"])
    assert told["bytes"] == sum(len(before[name]) for name in told["segments"])
    assert told["steps"] > 10
    assert verify.main([str(journal), "--json"]) == ends.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["first_sequence"] <= told["older"] + 1
    assert "trimmed" in {finding["rule"] for finding in found["findings"]}
    assert check(journal) == ends.DONE
    assert check(journal, "--from-snapshot") == ends.DONE
    out = capsys.readouterr().out
    assert f"begins at the snapshot behind record {told['older']}: what is older was trimmed" in out
    assert f"begins at the snapshot behind record {told['newer']}: as asked" in out
    assert trim.main([str(journal)]) == ends.DONE
    assert "nothing to trim: no segment ends before record" in capsys.readouterr().out
    goes_on_as(journal, lived[1])


def test_a_dry_run_deletes_nothing(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what would go."""
    before = files(journal)
    assert trim.main([str(journal), "--dry-run"]) == ends.DONE
    assert capsys.readouterr().out.startswith("would delete ")
    assert files(journal) == before


def another_state(directory: Path) -> str:
    """The newer snapshot is sound, but of a state that replay does not lead to."""
    path = snapshot_paths(directory)[1]
    storage = DiskStorage(directory)
    header, data = snapshots.load(storage, path.name)
    body = encode_body(msgspec.structs.replace(decode_body(data), next_request=999))
    path.unlink()
    changed = msgspec.structs.replace(header, body_bytes=len(body), digest=segment.digest(body))
    snapshots.write(storage, changed, body)
    return "the newer snapshot has another state than replay from the older one leads to: next_request"


def another_start(directory: Path) -> str:
    """The older one is."""
    path = snapshot_paths(directory)[0]
    storage = DiskStorage(directory)
    header, data = snapshots.load(storage, path.name)
    body = encode_body(msgspec.structs.replace(decode_body(data), sampled=bytes(16)))
    path.unlink()
    changed = msgspec.structs.replace(header, body_bytes=len(body), digest=segment.digest(body))
    snapshots.write(storage, changed, body)
    return f"replay from {header.sequence} differs: "


@pytest.mark.parametrize("change", [another_state, another_start])
def test_what_replay_does_not_lead_to_deletes_nothing(
    journal: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says so, and the words what differs."""
    words = change(journal)
    before = files(journal)
    assert trim.main([str(journal)]) == ends.NO
    assert capsys.readouterr().out.startswith(f"NOT trimmed, nothing was deleted: {words}")
    assert files(journal) == before


def one_only(directory: Path) -> None:
    snapshot_paths(directory)[0].unlink()


def torn(directory: Path) -> None:
    path = snapshot_paths(directory)[0]
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("change", [one_only, torn])
def test_without_two_usable_snapshots_there_is_nothing_to_trim(
    journal: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One alone proves nothing."""
    change(journal)
    before = files(journal)
    assert trim.main([str(journal)]) == ends.DONE
    out = capsys.readouterr().out
    assert out.startswith("nothing to trim: ")
    assert "there are 1" not in out
    assert files(journal) == before


def test_interrupted_anywhere_it_leaves_a_journal(journal: Path, lived: tuple[Path, World], tmp_path: Path) -> None:
    """The oldest go first: of the files that are to go, any number of the newest may still be there."""
    going = trim.trim(DiskStorage(journal), dry=True).segments
    assert len(going) >= 3
    for left in (going[place:] for place in range(len(going) + 1)):
        copy = Path(shutil.copytree(journal, tmp_path / f"left {len(left)} {left[:1]}"))
        for name in going:
            if name not in left:
                (copy / name).unlink()
        assert check(copy) == ends.DONE, left
        assert trim.main([str(copy)]) == ends.DONE
        goes_on_as(copy, lived[1])
        assert not set(going) & set(files(copy))


def test_a_gap_with_segments_in_front_of_it_was_not_trimmed(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though snapshots cover it: every command and a start name it and delete nothing; moved away, it is trimmed."""
    going = trim.trim(DiskStorage(journal), dry=True).segments
    gone, front = going[-1], going[:-1]
    (journal / gone).unlink()
    before = files(journal)
    assert verify.main([str(journal), "--json"]) == ends.DAMAGED
    assert "segment_missing" in {found["rule"] for found in json.loads(capsys.readouterr().out)["findings"]}
    assert check(journal) == ends.DAMAGED
    assert trim.main([str(journal)]) == ends.DAMAGED
    for command in (accounts, why):
        assert command.main([str(journal)]) == ends.DAMAGED
    said = capsys.readouterr().err
    number = gone.partition(".")[0]
    assert said.count(f"{number}.kvj at byte 0") == 4
    assert said.count(f"{front[0]} to {front[-1]} stand in front of it, so it was not trimmed: put it back, or") == 4
    with pytest.raises(JournalDamaged, match=f"{number}.*or move those away"):
        open_journal(DiskStorage(journal), SMALL, ID)
    assert {name: data for name, data in files(journal).items() if name != "LOCK"} == {
        name: data for name, data in before.items() if name != "LOCK"
    }
    for name in front:
        (journal / name).unlink()
    assert check(journal) == ends.DONE


def test_a_compression_does_not_bring_back_what_a_trim_deletes(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain file goes while its archive is being made: the archive goes too."""
    storage = DiskStorage(journal)
    first = segment_names(storage.names())[1]
    assert first.endswith(".kvj")
    renamed = storage.rename

    def rename(name: str, new_name: str) -> None:
        (journal / first).unlink(missing_ok=True)
        renamed(name, new_name)

    monkeypatch.setattr(storage, "rename", rename)
    compress_segments(storage, 2)
    assert 1 not in segment_names(storage.names())


def test_a_trimmed_journal_without_a_snapshot_is_damaged(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its beginning is missing, and nothing stands for it; or what does cannot be used."""
    trim.trim(DiskStorage(journal))
    for path in snapshot_paths(journal):
        path.write_bytes(b"x")
    assert check(journal) == ends.DAMAGED
    assert "what is older was trimmed, and no snapshot can be used" in capsys.readouterr().err
    for path in snapshot_paths(journal):
        path.unlink()
    assert check(journal) == ends.DAMAGED
    assert "segment_missing" in capsys.readouterr().err


def test_beside_a_daemon_that_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trimmed as often as it likes while the life goes on, compressed or not: everything stays reproducible."""
    storage = DiskStorage(tmp_path)
    world = World(storage, 5, "a", SMALL, snapshot_bytes=EVERY_BYTES)
    gone = 0
    for at in range(240):
        world.iterate()
        if at % 40 == 39:
            gone += len(trim.trim(DiskStorage(tmp_path)).segments)
            world.writer.compress_finished()
    world.writer.sync()
    assert gone >= 3
    assert min(segment_names(storage.names())) > 1
    assert check(tmp_path) == ends.DONE
    assert check(tmp_path, "--from-snapshot") == ends.DONE
    assert "snapshots, up to" in capsys.readouterr().out


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without a journal."""
    assert trim.main([str(tmp_path)]) == ends.USAGE
    assert "no journal segments" in capsys.readouterr().err
