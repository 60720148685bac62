"""`bandmaster export`: every field of every record arrives, filters choose, and the journal stays as it is."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from allocator.columns import i32, i64
from daemon.core.inputs import Arrived, Reported
from ipc.messages import Step
from journal.reader import Record, read_records
from journal.records import Kind
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.world import two_lives
from tools.export import command
from tools.export.plain import plain
from tools.incident import command as incident

SMALL = JournalSettings(segment_bytes=16 << 10)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives, the first cut off in its second epoch, over several segments."""
    return two_lives(tmp_path_factory.mktemp("lived"), (4, 5), (60, 20, 40), settings=SMALL)


def exported(directory: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[dict[str, Any]]:
    """The lines that the command prints."""
    assert command.main([str(directory), *options]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def records_of(directory: Path) -> list[Record]:
    return list(read_records(DiskStorage(directory)))


def test_every_record_is_a_line_with_every_field(lived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kinds, numbers and places are the journal's; columns are lists, other bytes hexadecimal digits."""
    got, records = exported(lived, capsys), records_of(lived)
    assert [(line["sequence"], line["file"], line["offset"]) for line in got] == [
        (one.sequence, one.file, one.offset) for one in records
    ]
    assert {line["kind"] for line in got} >= {"opened", "arrived", "stepped", "digested", "recovered", "closed"}
    for line, record in zip(got, records, strict=True):
        payload = record.decode()
        assert line["kind"] == Kind(record.kind).name.lower()
        assert list(line["record"]) == list(payload.__struct_fields__)
        if isinstance(payload, Arrived):
            assert line["record"]["generate"]["prompt"] == i64(payload.generate.prompt).tolist()
            assert line["record"]["generate"]["sampling"]["temperature"] == payload.generate.sampling.temperature
        elif isinstance(payload, Reported):
            assert line["record"]["tokens"] == i64(payload.tokens).tolist()
        elif isinstance(payload, Step):
            assert line["record"]["logical"] == payload.logical.hex()
            assert [op["type"] for op in line["record"]["ops"]] == [op.__struct_config__.tag for op in payload.ops]
            if payload.forward is not None:
                assert line["record"]["forward"]["rows"] == i32(payload.forward.rows).tolist()
                assert line["record"]["forward"]["flags"] == list(payload.forward.flags)


def test_kinds_and_ranges_choose(lived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the record's name or the kind's, and by sequence, also where that begins in a later segment."""
    everything = exported(lived, capsys)
    for names in (["--kind", "decided,Step"], ["--kind", "DECIDED", "--kind", "stepped"]):
        got = exported(lived, capsys, *names)
        assert got == [line for line in everything if line["kind"] in ("decided", "stepped")]
    last = everything[-1]["sequence"]
    got = exported(lived, capsys, "--from", str(last - 40), "--to", str(last - 7))
    assert got == [line for line in everything if last - 40 <= line["sequence"] <= last - 7]
    assert len(got) == 34


def test_a_request_is_followed_from_its_arrival_over_lives(lived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its arrival, everything about its id and every decision for it; of what a life took over only its group."""
    everything = exported(lived, capsys)
    taken_over = next(line for line in everything if line["kind"] == "recovered" and line["record"]["groups"])
    group = taken_over["record"]["groups"][0]
    number, id = group["accepted"]["first_request"], group["accepted"]["id"]
    got = exported(lived, capsys, "--request", str(number))
    assert got[0]["kind"] == "arrived"
    assert got[0]["record"]["generate"]["id"] == id
    assert [line["sequence"] for line in got] == sorted(line["sequence"] for line in got)
    decided = [line for line in everything if line["kind"] == "decided"]
    ours = [line for line in decided if number in (line["record"]["request"], line["record"]["by"])]
    assert [line for line in got if line["kind"] == "decided"] == ours
    recovered = [line for line in got if line["kind"] == "recovered"]
    assert [[one["accepted"]["first_request"] for one in line["record"]["groups"]] for line in recovered] == [[number]]


UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.decompress,
    ".GZ": gzip.decompress,
    ".jsonl.zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}


@pytest.mark.parametrize("suffix", UNPACK)
def test_a_file_is_packed_by_its_suffix(
    lived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """The same bytes as on standard output; nothing is left beside it."""
    assert command.main([str(lived)]) == 0
    printed = capsys.readouterr().out.encode()
    target = tmp_path / f"out{suffix}"
    assert command.main([str(lived), "-o", str(target)]) == 0
    assert UNPACK[suffix](target.read_bytes()) == printed
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize("name", ["x.zip", "x.jsonl.lz4", "x.tar.LZMA", "x.tgz"])
def test_a_compression_that_is_not_written_is_refused(
    name: str, lived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain text under such a name would deceive; an archive of `incident` is packed in one way only."""
    assert command.main([str(lived), "-o", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(" here; choose .bz2, .gz, .xz, .zst\n")
    for archive in (name, "x.tar.gz"):
        assert incident.main([str(lived), "-o", str(tmp_path / archive)]) == 2
        assert capsys.readouterr().err.endswith(" here; choose .zst\n")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_beside_the_journal(lived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output within its directory is refused, and so is a kind that no record has."""
    journal = Path(shutil.copytree(lived, tmp_path / "journal"))
    before = {path.name: path.read_bytes() for path in journal.iterdir()}
    assert command.main([str(journal), "-o", str(journal / "out.jsonl")]) == 2
    assert "never written to" in capsys.readouterr().err
    assert command.main([str(journal), "--kind", "decidedly"]) == 2
    assert "decidedly" in capsys.readouterr().err
    assert command.main([str(tmp_path / "nothing")]) == 2
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before


def test_damage_ends_the_export_or_is_passed(lived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is sound in front of it is exported, with where it is; with `--past-damage` also what is sound behind."""
    journal = Path(shutil.copytree(lived, tmp_path / "journal"))
    records = records_of(journal)
    hit = next(one for one in records if one.sequence > 40 and one.kind == Kind.STEPPED)
    data = bytearray((journal / hit.file).read_bytes())
    data[hit.offset + 40] ^= 1
    (journal / hit.file).write_bytes(data)
    got = exported(journal, capsys, code=4)
    assert got[-1]["sequence"] == hit.sequence - 1
    got = exported(journal, capsys, "--past-damage", code=4)
    assert {one.sequence for one in records} - {line["sequence"] for line in got} == {hit.sequence}


def test_a_torn_tail_is_told(lived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything up to it is exported, and the exit code is that of a sound journal: every crash leaves one."""
    journal = Path(shutil.copytree(lived, tmp_path / "journal"))
    last = records_of(journal)[-1]
    data = (journal / last.file).read_bytes()
    (journal / last.file).write_bytes(data[: last.offset + 20])
    assert command.main([str(journal)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["sequence"] == last.sequence - 1
    assert "torn" in err or last.file in err


def test_columns_with_a_broken_length_are_shown_as_bytes() -> None:
    """Nothing is dropped of a column that is no whole number of entries."""
    assert plain(Reported(1, 1, 1, b"\1\2\3", b"", np.int64(5).tobytes()))["rows"] == "010203"
