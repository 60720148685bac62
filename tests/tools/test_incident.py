"""`bandmaster incident`: the redacted journal decides what the original did, holds nothing of users, and replays."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from allocator.columns import i64
from daemon.core.inputs import Arrived, Reported
from daemon.core.outputs import Decided
from daemon.core.reasons import EndReason, Verdict
from journal import records, snapshots
from journal.reader import Record, read_records
from journal.records import Kind
from journal.snapshots import snapshot_names
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.world import EOS, World
from tests.tools.simulate_world import conversations, write
from tools import replay, trim
from tools.incident import command, summary
from tools.incident.excerpt import beginnings
from tools.incident.part import JournalPart, Nothing, Taken, fresh_names
from tools.incident.segments import SegmentFiles
from tools.replica import factories
from tools.simulate import command as simulate

SMALL = JournalSettings(segment_bytes=12 << 10)
EVERYTHING = 1 << 40


def lived(directory: Path, iterations: int = 90, seed: int = 3, snapshot_bytes: int = 0) -> World:
    """A world with lost ranks, killed, and another one that took over, killed too."""
    world = World(DiskStorage(directory), seed, "first", SMALL, snapshot_bytes=snapshot_bytes)
    for _ in range(iterations):
        world.iterate()
    world.end_epoch(1)
    world.begin_epoch(2)
    for _ in range(iterations // 3):
        world.iterate()
    world.writer.close()
    world = World(DiskStorage(directory), seed + 1, "second", SMALL, snapshot_bytes=snapshot_bytes)
    for _ in range(iterations):
        world.iterate()
    return world


@pytest.fixture(scope="module")
def two_lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    lived(directory).close()
    return directory


@pytest.fixture(scope="module")
def redacted(two_lives: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Taken]:
    """The whole journal, redacted."""
    target = tmp_path_factory.mktemp("redacted") / "out"
    return target, taken(two_lives, target)


@pytest.fixture(scope="module")
def with_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A life that made several snapshots, of which two files are left, and goes on behind them."""
    directory = tmp_path_factory.mktemp("snapshots")
    world = World(DiskStorage(directory), 3, "a", SMALL, snapshot_bytes=18_000)
    while world.keeper.written < 4 or world.keeper.complete:
        world.iterate()
    for _ in range(25):
        world.iterate()
    world.writer.close()
    return directory


def taken(source: Path, target: Path, last_bytes: int = EVERYTHING) -> Taken:
    """The redacted part, and that it replays."""
    found = JournalPart(DiskStorage(source), target, last_bytes, fresh_names(), lambda record: None).run()
    verdict = replay.replay_directory(str(target))
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.records == found.records > 0
    return found


def records_of(directory: Path, first: int = 1, last: int = EVERYTHING) -> list[Record]:
    return [record for record in read_records(DiskStorage(directory)) if first <= record.sequence <= last]


def agree(source: Path, target: Path, found: Taken) -> None:
    """Record for record: numbers, kinds, every decision, and what every step does to memory; up to the end."""
    assert found.damaged or found.last_sequence == records_of(source)[-1].sequence
    before = records_of(source, found.first_sequence, found.last_sequence)
    after = records_of(target, found.first_sequence)
    assert [(one.sequence, one.kind) for one in after] == [(one.sequence, one.kind) for one in before]
    for was, now in zip(before, after, strict=True):
        if was.kind == Kind.DECIDED:
            assert was.payload == now.payload
        elif was.kind == Kind.STEPPED:
            said, ours = was.decode(), now.decode()
            assert (said.ops, said.logical) == (ours.ops, ours.logical)  # type: ignore[attr-defined]


def sequences_of(directory: Path) -> list[list[int]]:
    """Prompts in the order of their arrival."""
    arrived: list[Any] = [one.decode() for one in records_of(directory) if one.kind == Kind.ARRIVED]
    return [i64(one.generate.prompt).tolist() for one in arrived]


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_lives_and_epochs_are_redacted_and_replay(two_lives: Path, redacted: tuple[Path, Taken]) -> None:
    """Over lost ranks and a daemon that took over: every decision is equal, and nothing is left out."""
    target, found = redacted
    assert (found.first_sequence, found.last_sequence) == (1, records_of(two_lives)[-1].sequence)
    assert (found.scheme, found.damaged, found.notes) == ("prefix", False, [])
    agree(two_lives, target, found)
    assert sum(one.kind == Kind.OPENED for one in records_of(target)) == 2
    assert sum(one.kind == Kind.EPOCH_ENDED for one in records_of(target)) == 1


def test_nothing_of_users_is_left(two_lives: Path, redacted: tuple[Path, Taken]) -> None:
    """No id and no front end; prompts, outputs and seeds are others; where an end-of-text id stood one stands."""
    target, _ = redacted
    everything = b"".join(one.payload for one in records_of(target))
    for record in records_of(two_lives):
        payload: Any = record.decode()
        if isinstance(payload, Arrived):
            for name in (payload.generate.id, payload.frontend):
                assert msgspec.msgpack.encode(name) not in everything
            assert msgspec.msgpack.encode(payload.seed) not in everything
    pairs = list(zip(sequences_of(two_lives), sequences_of(target), strict=True))
    ends = [token for was, now in pairs for a, token in zip(was, now, strict=True) if a == EOS]
    assert set(ends) == {EOS}
    others = [(a, b) for was, now in pairs for a, b in zip(was, now, strict=True) if a != EOS]
    assert EOS not in {b for _, b in others}
    assert sum(a == b for a, b in others) < len(others) / 30, "a hundredth stays by chance"
    sampled = [
        [i64(one.decode().tokens).tolist() for one in records_of(place) if one.kind == Kind.REPORTED]  # type: ignore[attr-defined]
        for place in (two_lives, target)
    ]
    both = [(a, b) for was, now in zip(*sampled, strict=True) for a, b in zip(was, now, strict=True)]
    assert all((a == EOS) == (b == EOS) for a, b in both)
    assert sum(a == b != EOS for a, b in both) < len(both) / 20


def test_prompts_are_equal_as_far_as_their_originals(
    two_lives: Path, redacted: tuple[Path, Taken], tmp_path: Path
) -> None:
    """So the prefix cache finds the same; two archives of one journal have other tokens."""
    taken(two_lives, tmp_path / "two")
    before, after = sequences_of(two_lives), sequences_of(redacted[0])
    for at in range(0, len(before), 3):
        for other in range(at):
            assert common(before[at], before[other]) == common(after[at], after[other])
    assert after != sequences_of(tmp_path / "two")


def test_an_archive_of_the_end_begins_at_a_snapshot(with_snapshots: Path, tmp_path: Path) -> None:
    """Its state is redacted: everything behind it is decided alike, and later snapshots are made anew."""
    snapshots_there = list(snapshot_names(DiskStorage(with_snapshots).names()))
    whole = sum(path.stat().st_size for path in with_snapshots.glob("*.kvj"))
    found = taken(with_snapshots, tmp_path / "out", whole // 2)
    assert found.snapshot in snapshots_there
    assert found.first_sequence == found.snapshot + 1
    agree(with_snapshots, tmp_path / "out", found)
    newest = taken(with_snapshots, tmp_path / "newest", 1)
    assert newest.snapshot == snapshots_there[-1]
    kept = snapshot_names(DiskStorage(tmp_path / "out").names())
    assert list(kept) == [one for one in snapshots_there if one >= found.snapshot]
    assert replay.main(["check", str(tmp_path / "out"), "--from-snapshot"]) == 0


def test_a_trimmed_journal_begins_at_its_oldest_snapshot(with_snapshots: Path, tmp_path: Path) -> None:
    """The state in the snapshot stands for all that is gone; nothing of its requests is left either."""
    journal = Path(shutil.copytree(with_snapshots, tmp_path / "journal"))
    assert trim.main([str(journal)]) == 0
    assert beginnings(DiskStorage(journal))[0][0].sequence > 0
    found = taken(journal, tmp_path / "out")
    assert found.snapshot == next(iter(snapshot_names(DiskStorage(journal).names())))
    agree(journal, tmp_path / "out", found)
    names = {one.decode().generate.id for one in records_of(with_snapshots) if one.kind == Kind.ARRIVED}  # type: ignore[attr-defined]
    for name in snapshot_names(DiskStorage(tmp_path / "out").names()).values():
        _, body = snapshots.load(DiskStorage(tmp_path / "out"), name)
        assert not [one for one in names if msgspec.msgpack.encode(one) in body]
        assert not [one for one in (b"\xa6front0", b"\xa6front1") if one in body]


def flipped(journal: Path, sequence: int) -> None:
    """A bit within a record."""
    hit = next(one for one in records_of(journal) if one.sequence == sequence)
    data = bytearray((journal / hit.file).read_bytes())
    data[hit.offset + 36] ^= 4
    (journal / hit.file).write_bytes(data)


def test_damage_in_front_of_a_snapshot_costs_what_is_before_it(with_snapshots: Path, tmp_path: Path) -> None:
    """The newest records are what an incident is about: the part begins behind the damage, and says so."""
    journal = Path(shutil.copytree(with_snapshots, tmp_path / "journal"))
    flipped(journal, 40)
    found = taken(journal, tmp_path / "out")
    assert found.damaged
    assert found.snapshot == next(iter(snapshot_names(DiskStorage(journal).names())))
    assert "before the next snapshot" in " ".join(found.notes)
    agree(with_snapshots, tmp_path / "out", found)


def test_damage_behind_every_snapshot_ends_the_part(two_lives: Path, tmp_path: Path) -> None:
    """What is in front of it is taken, what is behind cannot be redacted and is left out; so with a missing file."""
    journal = Path(shutil.copytree(two_lives, tmp_path / "journal"))
    flipped(journal, 300)
    found = taken(journal, tmp_path / "out")
    assert (found.damaged, found.last_sequence) == (True, 299)
    assert "left out" in " ".join(found.notes)
    journal = Path(shutil.copytree(two_lives, tmp_path / "gap"))
    (journal / "0000000003.kvj").unlink()
    found = taken(journal, tmp_path / "before")
    assert found.damaged
    assert 0 < found.last_sequence < next(one for one in records_of(two_lives) if one.file > "0000000003.kvj").sequence


def test_a_torn_tail_is_no_damage(two_lives: Path, tmp_path: Path) -> None:
    """A live daemon's journal ends anywhere."""
    journal = Path(shutil.copytree(two_lives, tmp_path / "journal"))
    last = records_of(journal)[-1]
    data = (journal / last.file).read_bytes()
    (journal / last.file).write_bytes(data[: last.offset + 11])
    found = taken(journal, tmp_path / "out")
    assert (found.damaged, found.last_sequence) == (False, last.sequence - 1)
    assert last.file in " ".join(found.notes)


def test_what_cannot_be_followed_is_left_out_and_said(two_lives: Path, tmp_path: Path) -> None:
    """A decision that no core of ours makes: the part ends in front of it."""
    journal, seen = tmp_path / "journal", 0
    with SegmentFiles(DiskStorage(prepared(journal)), bytes(16), 0, 1) as files:
        for record in records_of(two_lives):
            payload: Any = record.decode()
            if isinstance(payload, Decided) and record.sequence > 400 and not seen:
                seen = record.sequence
                payload = msgspec.structs.replace(payload, numbers={**payload.numbers, "tokens": 77})
            files.append(record.sequence, Kind(record.kind), records.encode(payload))
    found = taken(journal, tmp_path / "out")
    assert found.last_sequence == seen - 1
    assert f"record {seen} cannot be redacted" in " ".join(found.notes)


def test_a_life_of_another_version_keeps_its_steps(two_lives: Path, tmp_path: Path) -> None:
    """Its core cannot be followed: tokens that were sampled are 0, everything else is as it was."""
    journal = tmp_path / "journal"
    with SegmentFiles(DiskStorage(prepared(journal)), bytes(16), 0, 1) as files:
        for record in records_of(two_lives):
            payload: Any = record.decode()
            if record.kind == Kind.OPENED and record.sequence == 1:
                payload = msgspec.structs.replace(payload, decision_version=1)
            files.append(record.sequence, Kind(record.kind), records.encode(payload))
    found = taken(journal, tmp_path / "out")
    agree(journal, tmp_path / "out", found)
    assert "of version 1" not in found.scheme
    assert "version 1" in " ".join(found.notes)
    first: list[Any] = [one.decode() for one in records_of(tmp_path / "out", last=300) if one.kind == Kind.REPORTED]
    assert {token for one in first for token in i64(one.tokens).tolist()} == {0}


def prepared(directory: Path) -> Path:
    directory.mkdir()
    return directory


# --- a real cache under pressure -----------------------------------------------------------------------------------


def simulated(place: Path, rows: list[dict[str, Any]], *bands: str) -> Path:
    """The journal of a run on an arena that is far too small."""
    trace = write(place / "trace.jsonl", [row | {"output_length": 2} for row in rows])
    shape = [word for band in bands for word in ("--band", band)]
    sizes = ["--page-size", "16", "--max-running-requests", "8", "--no-bound", "--json", "--policy", "value"]
    arena = ["--arena-fraction", "25%", "--block-tokens", "256", "--journal", str(place / "journal")]
    assert simulate.main([str(trace), *shape, *sizes, *arena]) == 0
    return place / "journal"


@pytest.fixture(scope="module")
def pressured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three bands, and conversations whose paths were evicted before they go on."""
    bands = ("full=4096/page", "window:128=4096/page", "state:256=9000/slot")
    return simulated(tmp_path_factory.mktemp("pressured"), conversations(5, 80, 20, block=256, talks=8), *bands)


def trimmed(source: Path, target: Path, share: float) -> tuple[Path, int]:
    """The same journal with a snapshot in front of its last part, and nothing before."""
    steps = [one for one in records_of(source) if one.kind == Kind.STEPPED]
    at = steps[int(len(steps) * share)].sequence
    verdict = replay.replay_directory(str(source), at)
    core: Any = verdict.replay.core
    assert core is not None
    make, reported = factories(), 0
    mirror, stages, sampled = None, [], make.sampled_start
    for record in records_of(source, last=at):
        payload: Any = record.decode()
        if record.kind == Kind.EPOCH_BEGAN:
            mirror, config = make.mirror(payload.geometry), core.state.config
            stages = [make.stage(payload.geometry, 0, config, payload.facts)]
        elif record.kind == Kind.STEPPED:
            assert mirror is not None
            mirror.apply_step(payload.seq, payload.ops, payload.released)
            stages[0].apply_step(payload)
            seq = payload.seq
        elif isinstance(payload, Reported):
            sampled = make.sampled(sampled, payload.seq, payload.rows, payload.generations, payload.tokens)
            reported = payload.seq
    body = snapshots.encode_body(
        snapshots.Body(
            make.core_state(core), [stages[0].state(mirror)], reported, sampled, core.recoverable(), core.next_request
        )
    )
    life, version = "a", records.DECISION_VERSION
    header = snapshots.Header(bytes(16), life, version, at, 1, seq, len(body), snapshots.digest(body))
    storage = DiskStorage(prepared(target))
    snapshots.write(storage, header, body)
    with SegmentFiles(storage, bytes(16), at, 1) as files:
        for record in records_of(source, at + 1):
            files.append(record.sequence, Kind(record.kind), record.payload)
    return target, at


def test_a_cache_under_pressure_finds_and_evicts_the_same(pressured: Path, tmp_path: Path) -> None:
    """Hits, evictions and everything that was learned of the paths of prompts."""
    found = taken(pressured, tmp_path / "out")
    agree(pressured, tmp_path / "out", found)
    decided: list[Any] = [one.decode() for one in records_of(pressured) if one.kind == Kind.DECIDED]
    assert sum(one.verdict == "evicted" for one in decided) > 5
    assert sum(one.numbers.get("cached_tokens", 0) for one in decided) > 1000


def test_a_trimmed_cache_under_pressure_goes_on_the_same(pressured: Path, tmp_path: Path) -> None:
    """The trees of three bands, their queues and their locks are redacted in the snapshot."""
    journal, at = trimmed(pressured, tmp_path / "journal", 0.5)
    assert replay.replay_directory(str(journal)).divergence is None
    found = taken(journal, tmp_path / "out")
    assert found.snapshot == at
    agree(journal, tmp_path / "out", found)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with a first block of their own and the rest in common: the cache takes one for the other's next turn."""
    rows = conversations(5, 150, 20, block=256, talks=8)
    rows = [row | {"hash_ids": [10**6 + at, *row["hash_ids"][1:]]} for at, row in enumerate(rows)]
    return simulated(tmp_path_factory.mktemp("apart"), rows, "full=4096/page")


def test_where_only_pages_are_equal_the_second_scheme_is_taken(apart: Path, tmp_path: Path) -> None:
    """By the first one the followed core would learn otherwise what is used again."""
    found = taken(apart, tmp_path / "out")
    assert (found.scheme, found.notes) == ("page", [])
    agree(apart, tmp_path / "out", found)


def test_evicted_paths_of_a_snapshot_are_known_again(apart: Path, tmp_path: Path) -> None:
    """They are there as digests of tokens that are gone; prompts behind the snapshot say which those were."""
    journal, at = trimmed(apart, tmp_path / "journal", 0.3)
    found = taken(journal, tmp_path / "out")
    assert found.snapshot == at
    assert len(found.notes) == 1, found.notes
    agree(journal, tmp_path / "out", found)


def test_a_part_that_begins_nowhere_is_refused(with_snapshots: Path, tmp_path: Path) -> None:
    """A trimmed journal whose snapshots are all unusable."""
    journal = Path(shutil.copytree(with_snapshots, tmp_path / "journal"))
    assert trim.main([str(journal)]) == 0
    for name in snapshot_names(DiskStorage(journal).names()).values():
        (journal / name).write_bytes(b"nothing")
    with pytest.raises(Nothing, match="no snapshot"):
        JournalPart(DiskStorage(journal), tmp_path / "out", EVERYTHING, fresh_names(), lambda record: None)


# --- the archive ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(two_lives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dead daemon's directory."""
    place = tmp_path_factory.mktemp("run")
    shutil.copytree(two_lives, place / "journal")
    (place / "logs").mkdir()
    lines = [
        {"event": "Finished", "id": "r1", "request": 1, "detail": "stop token 7"},
        {"event": "X", "text": "secret"},
    ]
    (place / "logs" / "daemon.log").write_text("\n".join(map(json.dumps, lines)) + "\nplain words\n")
    return place


def unpacked(archive: Path, target: Path) -> Path:
    """The one folder in an archive."""
    data = zstandard.ZstdDecompressor().decompressobj().decompress(archive.read_bytes())
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4
        files.extractall(target, **safe)
    folders = list(target.iterdir())
    assert len(folders) == 1
    return folders[0]


def test_an_archive_holds_journal_logs_versions_and_a_summary(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a dead daemon: its journal replays out of the archive, and the summary tells of both lives."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    target = tmp_path / "incident.tar.zst"
    assert command.main([str(run_dir), "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["redacted"], said["replays"]) == (True, True)
    assert target.stat().st_mode & 0o777 == 0o600
    folder = unpacked(target, tmp_path / "out")
    assert replay.main(["check", str(folder)]) == 0
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"summary.txt", "contents.json", "machine.json", "logs/daemon.log", "journal/0000000001.kvj"}
    text = (folder / "summary.txt").read_text()
    for words in ("Life second", "Life first", "the world ends it", "no daemon runs"):
        assert words in text
    _, older = text.split("Life second")[1].split("Life first")
    assert "or goes on" not in older, "another life stands behind it"
    assert "ended by no record: it was cut off: the daemon was killed, or it crashed" in older
    logged = (folder / "logs" / "daemon.log").read_text()
    assert json.loads(logged.splitlines()[0])["request"] == 1
    for words in ("secret", "plain words", '"r1"', "stop token 7"):
        assert words not in logged
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_prompts_are_taken_where_that_is_asked(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then files are as they are, damaged ones too, and the archive says that nothing is redacted."""
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    flipped(run / "journal", 300)
    target = tmp_path / "all.tar.zst"
    assert command.main([str(run), "-o", str(target), "--include-prompts"]) == 4
    assert "NOT redacted" in capsys.readouterr().out
    folder = unpacked(target, tmp_path / "out")
    for path in (run / "journal").glob("*.kvj"):
        assert (folder / "journal" / path.name).read_bytes() == path.read_bytes()
    assert "NOT redacted" in (folder / "summary.txt").read_text()
    assert "plain words" in (folder / "logs" / "daemon.log").read_text()


def test_an_archive_goes_nowhere_into_the_run_directory(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is one made of nothing, or of a size that is none."""
    assert command.main([str(run_dir), "-o", str(run_dir / "journal" / "x.tar.zst")]) == 2
    assert "never written to" in capsys.readouterr().err
    assert command.main([str(tmp_path), "-o", str(tmp_path / "x.tar.zst")]) == 2
    assert not (tmp_path / "x.tar.zst").exists()
    for size in ("0", "much", "12XiB"):
        with pytest.raises(SystemExit):
            command.main([str(run_dir), "--last", size])


def test_what_a_life_took_over_is_as_long_as_it_was(two_lives: Path, redacted: tuple[Path, Taken]) -> None:
    """Requests, choices and their output; that it is the output that was sampled is what replay compares."""
    lengths = []
    for place in (two_lives, redacted[0]):
        left: list[Any] = [one.decode() for one in records_of(place) if one.kind == Kind.RECOVERED]
        groups = [group for one in left for group in one.groups]
        lengths.append([[len(choice.tokens) for choice in group.choices] for group in groups])
    assert lengths[0] == lengths[1]
    assert any(map(sum, lengths[0])), "nothing was taken over"


@pytest.mark.parametrize("missing", [True, False])
def test_without_its_first_segment_a_journal_is_taken_only_as_it_is(
    missing: bool, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said is what is there: a missing file was not trimmed, and nothing was reproduced of no record."""
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    first, second = (run / "journal" / name for name in ("0000000001.kvj", "0000000002.kvj"))
    first.unlink() if missing else first.write_bytes(bytes(first.stat().st_size))
    target = tmp_path / "all.tar.zst"
    assert command.main([str(run), "-o", str(target)]) == 4
    said = capsys.readouterr().err
    assert ("a segment file is missing" if missing else "no record stands in front of its journal's damage") in said
    assert "trimmed" not in said
    assert first.name in said
    assert not target.exists()
    assert command.main([str(run), "-o", str(target), "--include-prompts"]) == 4
    said = capsys.readouterr().out
    assert "no record in front of the damage" in said
    assert "nothing was replayed, it is damaged" in said
    folder = unpacked(target, tmp_path / "out")
    assert (folder / "journal" / second.name).read_bytes() == second.read_bytes()
    assert "nothing was replayed" in (folder / "summary.txt").read_text()


def test_the_summary_counts_choices_and_says_of_how_many_arrivals(tmp_path: Path) -> None:
    """As accounts, metrics and `view` count; what was drained failed, as `why` and accounts have it."""
    decided = [
        Decided(1, Verdict.ACCEPTED, 1, "", {"n": 3}),
        Decided(2, Verdict.ACCEPTED, 4, "", {}),
        Decided(3, Verdict.REFUSED, 0, "closed", {"n": 2}),
        *(Decided(4, Verdict.ENDED, number, EndReason.DRAINED) for number in (1, 2, 3, 4)),
    ]
    journal = [Record(at, Kind.DECIDED, records.encode(one), "", 0) for at, one in enumerate(decided, 1)]
    lines = list(summary.text(summary.read(journal, lambda record: None), tmp_path, [], ""))
    counts = "accepted 4 (choices of 2 arrivals), ended 4, refused 2 (choices of 1 arrival)"
    assert f"  decided: {counts}" in lines
    assert lines[-1] == "Requests that failed: 4, 4 of them drained as the daemon ended"
