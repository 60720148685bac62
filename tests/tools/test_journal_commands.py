"""What holds for every command that reads a journal: lost output, no journal, a damaged one; all end alike."""

from __future__ import annotations

import importlib
import os
import shutil
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import BadStatusLine
from pathlib import Path
from urllib.error import URLError

import pytest

from journal.segment import segment_behind, segment_names
from journal.snapshots import snapshot_names
from journal.storage import DiskStorage
from tests.tidy.source import ROOT
from tests.tools.view_scenes import pressed, troubled
from tools import ends, result_files
from tools.cli import COMMANDS

NAMED = {"bench": "bandmaster bench replay", "replay diff": "bandmaster replay diff"}
READING: dict[str, list[str]] = {
    "verify": ["verify", "DIR"],
    "verify --json": ["verify", "DIR", "--json"],
    "trim": ["trim", "--dry-run", "DIR"],
    "replay check": ["replay", "check", "DIR", "--processes", "1"],
    "replay check --json": ["replay", "check", "DIR", "--processes", "1", "--json"],
    "replay until": ["replay", "until", "9", "DIR", "--processes", "1"],
    "replay diff": ["replay", "diff", "DIR", "DIR"],
    "why": ["why", "1", "DIR"],
    "why list": ["why", "DIR"],
    "what-if": ["what-if", "DIR", "--replays", "1"],
    "view": ["view", "DIR", "-o", "NEW"],
    "view --json": ["view", "DIR", "-o", "NEW", "--json"],
    "export": ["export", "DIR"],
    "export perfetto": ["export", "DIR", "--format", "perfetto"],
    "incident": ["incident", "DIR", "-o", "NEW"],
    "incident --json": ["incident", "DIR", "-o", "NEW", "--json"],
    "accounts": ["accounts", "DIR"],
    "bench replay": ["bench", "replay", "--journal", "DIR", "--processes", "1"],
}
"""Every command that reads a journal's directory, and the ways it prints."""

MAIN = """
import sys
from tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small journal of a simulated run."""
    return pressed(tmp_path_factory.mktemp("journal"))


def called(arguments: list[str], journal: Path, folder: Path) -> list[str]:
    """A row of the table with its places filled in."""
    places = {"DIR": str(journal), "NEW": str(folder / "new")}
    return [places.get(word, word) for word in arguments]


def name_of(row: str) -> str:
    """What the command calls itself in front of an error."""
    first = row.split()[0]
    return NAMED.get(row, NAMED.get(first, f"bandmaster {first}"))


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in this process."""
    main: Callable[[list[str]], int] = importlib.import_module(COMMANDS[arguments[0]].module).main
    try:
        code = main(arguments[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else -1
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("row", READING)
def test_a_full_disk_behind_standard_output_is_said_in_one_line(
    row: str, journal: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the reason by name, no traceback; nothing is said of it later when the output is closed."""
    arguments = called(READING[row], journal, tmp_path)
    main: Callable[[list[str]], int] = importlib.import_module(COMMANDS[arguments[0]].module).main
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments[1:]) == 1
        monkeypatch.undo()
        with suppress(OSError):  # what the file still holds is lost as well
            full.close()
    said = capfd.readouterr().err
    assert said == f"{name_of(row)}: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("row", ["verify", "replay check --json", "incident", "export"])
def test_a_reader_who_has_enough_is_no_error_to_speak_of(row: str, journal: Path, tmp_path: Path) -> None:
    """A process whose output's reader has left ends with 1 and says nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *called(READING[row], journal, tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(timeout=100)
    assert (process.returncode, said) == (1, "")


NOWHERE: dict[str, tuple[dict[str, bytes], str]] = {
    "a file": ({"": b"x"}, "this is no directory"),
    "nothing there": ({}, "there is no such directory"),
    "no segment": ({"other": b""}, "no journal segments"),
    "an empty segment": ({"0000000001.kvj": b""}, "nothing was recorded"),
    "an empty segment of a run": ({"journal/0000000001.kvj": b""}, "nothing was recorded"),
}
"""Files of a place that has no journal, by name, "": the place itself, and what is said of it."""


@pytest.mark.parametrize("kind", NOWHERE)
@pytest.mark.parametrize("row", READING)
def test_a_directory_without_a_journal_is_refused_alike(
    row: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that begins with the directory as it was named; nothing is made."""
    files, why = NOWHERE[kind]
    for name, content in files.items():
        path = tmp_path / "place" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    code, out, err = run(called(READING[row], tmp_path / "place", tmp_path), capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"{name_of(row)}: {tmp_path / 'place'}: {why}")
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"place"}


def segment(journal: Path, sequence: int) -> Path:
    """The file with a record; it is behind a few others, so that damage there meets whoever begins at a snapshot."""
    return journal / segment_names(DiskStorage(journal).names())[segment_behind(DiskStorage(journal), sequence)]


def flipped(file: Path) -> None:
    """A byte of one of the first records is another."""
    content = bytearray(file.read_bytes())
    content[400] ^= 0xFF
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a changed byte": flipped,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:400]),
    "no byte": lambda file: file.write_bytes(b""),
    "nothing of a journal": lambda file: file.write_bytes(bytes(5000)),
}
"""What may have happened to a segment behind which others stand."""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of many segments with two snapshots."""
    return troubled(tmp_path_factory.mktemp("lives"), snapshot_bytes=20_000)


def hurt(lives: Path, place: Path, damage: Callable[[Path], object]) -> list[str]:
    """A copy with two damaged segments, the one that all begin with and the first behind the older snapshot."""
    shutil.copytree(lives, place)
    older = min(snapshot_names(DiskStorage(place).names()))
    files = [segment(place, 1), segment(place, older + 1)]
    for file in files:
        damage(file)
    return [file.name for file in files]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("row", READING)
def test_damage_ends_all_alike(
    row: str, kind: str, lives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4; the segment is named, in what is told of the rest or else in the one line that there is."""
    names = hurt(lives, tmp_path / "place", DAMAGE[kind])
    code, out, err = run(called(READING[row], tmp_path / "place", tmp_path), capsys)
    assert code == ends.DAMAGED
    assert any(name.partition(".")[0] in out + err for name in names)
    assert err.count("\n") == 1 if err else out
    assert err.startswith(f"{name_of(row)}: ") or not err


SOLE: dict[str, Callable[[Path], object]] = {
    "a changed byte": flipped,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:400]),
    "nothing of a journal": lambda file: [one.write_bytes(bytes(5000)) for one in file.parent.glob("*.kvj")],
    "missing": lambda file: file.unlink(),
}
"""What may have happened to the first of a few segments."""


@pytest.mark.parametrize("kind", SOLE)
@pytest.mark.parametrize("row", READING)
def test_damage_where_no_snapshot_is_ends_all_alike(
    row: str, kind: str, lives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4 and no traceback, also of those that would begin, or be done, at a snapshot."""
    place = Path(shutil.copytree(lives, tmp_path / "place"))
    for name in snapshot_names(DiskStorage(place).names()).values():
        (place / name).unlink()
    SOLE[kind](segment(place, 1))
    code, out, err = run(called(READING[row], place, tmp_path), capsys)
    assert code == ends.DAMAGED
    assert err.startswith(f"{name_of(row)}: ") or (out and not err)
    assert "trimmed part" not in out + err


UNREADABLE = {"a segment": "read", "the directory": "names"}
"""What cannot be read, and what of the storage then fails."""


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("row", READING)
def test_what_cannot_be_read_ends_all_alike(
    row: str,
    kind: str,
    lives: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 4 and one line with the file, which is blamed on no output; nothing is left behind."""

    def refused(self: DiskStorage, name: str = "") -> bytes:
        raise PermissionError(13, "Permission denied", str(self.directory / name))

    monkeypatch.setattr(DiskStorage, UNREADABLE[kind], refused)
    code, out, err = run(called(READING[row], lives, tmp_path), capsys)
    assert code == ends.DAMAGED
    assert out == "" or row == "export perfetto"  # a trace that has begun gets its end
    assert err.startswith(f"{name_of(row)}: {lives}")
    assert err.endswith(" cannot be read: Permission denied\n")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_segment_that_cannot_be_deleted_is_no_damage(
    lives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 and one line with the file, which is still there."""

    def refused(self: DiskStorage, name: str) -> None:
        raise PermissionError(13, "Permission denied", str(self.directory / name))

    place = Path(shutil.copytree(lives, tmp_path / "place"))
    before = sorted(path.name for path in place.iterdir())
    monkeypatch.setattr(DiskStorage, "remove", refused)
    code, out, err = run(["trim", str(place)], capsys)
    assert (code, out) == (ends.NO, "")
    assert err == f"bandmaster trim: {place / '0000000001.kvj'} cannot be deleted: Permission denied\n"
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["replay", "plant", "--only", "lost-op"], ends.NO), (["accounts", "--simulate", "400"], ends.USAGE)],
)
def test_journals_that_cannot_be_kept_are_no_damage(
    arguments: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the place, no traceback."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    got, out, err = run([*arguments, "--keep", str(file / "in")], capsys)
    assert (got, out) == (code, "")
    assert str(file) in err
    assert err.count("\n") == 1


def test_the_table_of_exit_codes_has_every_command_that_reads_a_journal(capsys: pytest.CaptureFixture[str]) -> None:
    """And `--help` of each tells its row."""
    told = {row.split(" --")[0] for row in READING} - {"bench replay", "export perfetto", "why list"}
    assert told == set(ends.COMMANDS)
    for name in told:
        code, out, _ = run([*name.split(), "--help"], capsys)
        assert code == 0
        assert " ".join(ends.codes(name).split()) in " ".join(out.split())


@pytest.mark.parametrize("command", ["export", "incident", "view"])
def test_a_pipe_as_the_file_gets_the_bytes_and_stays(
    command: str,
    journal: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is no regular file is written to, never replaced, and nothing is left beside it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = tmp_path_factory.mktemp("got") / "got"
    with got.open("wb") as file, subprocess.Popen(["cat", str(pipe)], stdout=file):
        code, _, err = run([command, str(journal), "-o", str(pipe)], capsys)
    assert (code, err) == (0, "")
    assert got.stat().st_size > 1000
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("command", ["export", "incident"])
def test_the_name_of_standard_output_as_the_file(command: str, append: bool, journal: Path, tmp_path: Path) -> None:
    """It gets the bytes and nothing else; a file behind it stays the same one, and keeps what others wrote to it."""
    file = tmp_path / "file"
    file.write_bytes(b"before")
    number = file.stat().st_ino
    with file.open("ab" if append else "wb") as output:
        arguments = [command, str(journal), "-o", "/dev/stdout"]
        done = subprocess.run([sys.executable, "-c", MAIN, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    got = file.read_bytes()
    assert got.startswith(b"before") is append
    begins = b'{"sequence":1,' if command == "export" else b"\x28\xb5\x2f\xfd"
    assert got.removeprefix(b"before").startswith(begins)
    assert got.endswith(b"}\n") is (command == "export")
    assert file.stat().st_ino == number
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["export", "DIR", "-o", "NOWHERE/x.jsonl"], 2, "there is no directory"),
        (["view", "DIR", "-o", "NOWHERE/x.html"], 2, "there is no directory"),
        (["view", "DIR", "-o", "DIR/.."], 2, "is a directory; name a file"),
        (["export", "DIR", "-o", "DIR/.."], 2, "is a directory; name a file"),
        (["incident", "DIR", "-o", "NOWHERE/x.tar.zst"], 2, "is no directory"),
        (["export", "DIR", "--request", "99999"], 2, "the journal has no request 99999 up to record"),
        (["export", "DIR", "--request", "99999", "--format", "perfetto", "-o", "NEW"], 2, "no request 99999"),
        (["export", "DIR", "--request", "3", "--to", "2"], 2, "no request 3 up to record 2; none was accepted"),
        (["export", "DIR", "--from", "50", "--to", "10"], 2, "--from 50 is behind --to 10"),
        (["export", "DIR", "--from", "999999"], 2, "nothing was exported: the journal ends at"),
        (["export", "DIR", "--from", "999999", "-o", "NEW"], 2, "before --from 999999"),
        (["export", "DIR", "--from", "999999", "--format", "perfetto", "-o", "NEW"], 2, "before --from 999999"),
        (["export", "DIR", "--kind", ""], 2, "--kind names no kind"),
        (["export", "DIR", "--kind", " , "], 2, "--kind names no kind"),
        (["view", "DIR", "--from", "50", "--to", "10", "-o", "NEW"], 2, "--from 50 is behind --to 10"),
        (["view", "DIR", "--from", "999999", "-o", "NEW"], 2, "no record to show; the journal ends at"),
        (["accounts", "DIR", "--log", "NOWHERE/log"], 2, "there is no such file"),
        (["accounts", "DIR", "--url", "nonsense"], 2, "write it like http://"),
        (["accounts", "DIR", "--url", "http://127.0.0.1:9", "--for", "nan"], 2, "--for nan: so many seconds cannot"),
        (["accounts", "DIR", "--url", "http://127.0.0.1:9", "--for", "0"], 2, "more than 0, at most 86,400"),
        (["accounts", "DIR", "--url", "http://127.0.0.1:9", "--for", "1e400"], 2, "more than 0, at most 86,400"),
        (["accounts", "DIR", "--url", "http://127.0.0.1:9", "--for", "1e308"], 2, "more than 0, at most 86,400"),
        (["accounts", "--simulate", "0"], 2, "--simulate 0: at least 400 requests"),
        (["accounts", "--simulate", "9" * 20], 2, "99: at most 10,000,000 requests"),
        (["accounts", "DIR", "--url", "http://127.0.0.1:9", "--for", "-1"], 2, "--for -1: so many seconds cannot"),
        (["accounts", "--simulate", "400", "--keep", "DIR/0000000001.kvj"], 2, "this is no directory; name a new one"),
        (["accounts", "--simulate", "50"], 2, "--simulate 50: at least 400 requests"),
        (["accounts", "--simulate", "-5"], 2, "--simulate -5: at least 400 requests"),
        (["replay", "diff", "DIR", "DIR", "--context", "-1"], 2, "'-1' is no number of records to show; 0 to 10,000"),
        (["replay", "diff", "DIR", "DIR", "--context", "9" * 20], 2, "is no number of records to show"),
        (["what-if", "DIR", "arena_bytes="], 2, "--arena-bytes (what-if): '' is not allowed"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    arguments: list[str], code: int, said: str, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line, and no file."""
    places = {"NOWHERE": str(tmp_path / "nowhere"), "DIR/..": str(journal.parent), "DIR/": f"{journal}/"}
    words = called(arguments, journal, tmp_path)
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    got, out, err = run(words, capsys)
    assert (got, out) == (code, "")
    assert said in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (BadStatusLine("SSH-2.0"), "SSH-2.0"),
        (TimeoutError("timed out"), "timed out"),
    ],
)
def test_where_nobody_answers_accounts_says_so(
    failure: Exception, why: str, journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the address and the reason, in words of neither Python nor the system's numbers."""

    def refused(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(urllib.request, "urlopen", refused)
    code, out, err = run(["accounts", str(journal), "--url", "http://127.0.0.1:9"], capsys)
    assert (code, out) == (ends.USAGE, "")
    assert err == f"bandmaster accounts: nobody answers at http://127.0.0.1:9/metrics: {why}\n"


def test_one_of_a_thing_has_the_word_for_one(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line of `view`."""
    code, out, _ = run(["view", str(journal), "-o", str(tmp_path / "x.html")], capsys)
    assert code == 0
    assert " decisions, 1 life, 1 epoch (" in out


def test_a_request_that_is_there_is_exported_whoever_names_it(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a range leaves none of its records, and as a trace."""
    ways: list[list[str]] = [[], ["--kind", "stepped"], ["--format", "perfetto"]]
    for more in ways:
        code, _, err = run(["export", str(journal), "--request", "2", "-o", str(tmp_path / "x"), *more], capsys)
        assert (code, err) == (0, "")


def test_what_a_reader_leaves_is_no_damaged_journal(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who leaves a pipe early costs exit code 1 and a line with the file's name; the pipe stays."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    leave = "import os, sys; os.read(os.open(sys.argv[1], os.O_RDONLY), 1)"
    with subprocess.Popen([sys.executable, "-c", leave, str(pipe)]):
        code, _, err = run(["export", str(journal), "-o", str(pipe)], capsys)
    assert (code, err) == (1, f"bandmaster export: {pipe} cannot be written: Broken pipe\n")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_record_behind_the_end_has_a_note(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state at the end is told, and that it is the end's."""
    code, out, _ = run(["replay", "until", "999999", str(journal), "--processes", "1"], capsys)
    assert code == 0
    assert "note: the journal ends at record" in out


@pytest.mark.parametrize("full", [True, False])
def test_an_old_page_stays_until_the_new_one_is_whole(
    full: bool, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at the end leaves it as it was, and nothing beside it."""

    def fsync(handle: int) -> None:
        if full:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(result_files.os, "fsync", fsync)
    for command in ("view", "export"):
        page = tmp_path / command
        page.write_text("old")
        code, _, err = run([command, str(journal), "-o", str(page)], capsys)
        assert (code, page.read_text() == "old") == ((1, True) if full else (0, False))
        assert ("No space left on device" in err) is full
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "view"]
