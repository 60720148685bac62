"""`bandmaster accounts`: three ways to count the same requests, and every way in which one of them may be wrong."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.columns import pack_i64
from daemon.core.account import Account
from daemon.core.inputs import Arrived, Recovered, RecoveredChoice, RecoveredGroup, Ticked
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.reasons import EndReason
from daemon.metrics import Metrics
from ipc.messages import Accepted, Generate, Sampling
from journal import records
from journal.reader import Record
from journal.records import DECISION_VERSION, KIND_OF, SCHEMA_VERSION, Closed, Opened
from tools import cli
from tools.accounts import command
from tools.accounts.check import Checker, Result
from tools.accounts.log_side import LogLines
from tools.accounts.metrics_side import NoScrape, Scrape, read_scrape
from tools.accounts.plants import PLANTS, Found, try_plant
from tools.accounts.simulated import simulate
from tools.accounts.world.world import World

LIFE = "a" * 32
NEXT = "b" * 32


class Book:
    """A journal, its log and its scrapes, as a daemon would write them; a test leaves out or adds what it likes."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.lines: list[bytes] = []
        self.scrapes: list[Scrape] = []
        self.life = ""

    def put(self, item: Any) -> int:
        """Append a record; its number."""
        sequence = len(self.records) + 1
        self.records.append(Record(sequence, KIND_OF[type(item)], records.encode(item), "x.kvj", 0))
        return sequence

    def say(self, event: str, **values: Any) -> None:
        """Write a line of the log."""
        self.lines.append(json.dumps({**values, "event": event}).encode() + b"\n")

    def open(self, life: str = LIFE) -> None:
        """A life begins."""
        self.life = life
        sequence = self.put(Opened(0, life, SCHEMA_VERSION, DECISION_VERSION, CoreConfig(), {}, {}))
        self.say("Opened", life=life, sequence=sequence)

    def arrive(self, id: str, first: int, n: int = 1, line: bool = True, decided: bool = True) -> None:
        """A request is accepted."""
        generate = Generate(id, pack_i64([1, 2]), Sampling(), 4, n=n)
        self.put(Arrived(1, "fe", generate, 1))
        if decided:
            sequence = self.put(Decided(1, "accepted", first, "", {"n": n}))
            if line:
                self.say("Accepted", sequence=sequence, request=first, id=id, n=n)

    def refuse(self, id: str, n: int = 1, said: int = 0) -> None:
        """A request is refused; its decision says `said` choices."""
        self.put(Arrived(1, "fe", Generate(id, b"", Sampling(), 4, n=n), 1))
        sequence = self.put(Decided(1, "refused", 0, "empty_prompt", {"n": said or n}))
        self.say("Refused", sequence=sequence, id=id, n=n, code="empty_prompt")

    def end(self, request: int, reason: str = "length", line: bool = True, **more: Any) -> None:
        """A choice ends."""
        self.put(Ticked(2))
        sequence = self.put(Decided(2, "ended", request, reason))
        if line:
            self.say("Finished", sequence=sequence, request=request, reason=reason, **more)

    def scrape(self, ends: dict[str, int] | None = None, failures: int = 0, **account: int) -> None:
        """Somebody scrapes behind the newest record."""
        whole = {reason.value: 0 for reason in EndReason} | (ends or {})
        self.scrapes.append(Scrape(self.life, len(self.records), Account(**account), whole, failures=failures))

    def close(self, **totals: int) -> None:
        """The life ends in order."""
        self.put(Closed(9, "stop", {f"{name}_total": count for name, count in totals.items()}, b""))

    def take_over(self, *numbers: int) -> None:
        """What an earlier life left goes on."""
        groups = [
            RecoveredGroup("fe", Generate(f"r{at}", b"", Sampling()), 1, Accepted(f"r{at}", at, 1, 4, 1), 1, [left])
            for at in numbers
            for left in [RecoveredChoice(b"")]
        ]
        self.say("Recovered", live=len(numbers), next_request=50)
        self.put(Recovered(1, groups, 50))
        for number in numbers:
            self.put(Decided(1, "recovered", number, ""))

    def check(self, alive: bool = False) -> Result:
        """What the check makes of it."""
        checker = Checker(LogLines(lambda: self.lines), self.scrapes, alive)
        return checker.run(self.records, lambda record: None)

    def found(self) -> list[tuple[str, str]]:
        """Who disagrees, and the words."""
        return [(one.between, one.text) for one in self.check().findings.kept]

    def said(self, between: str) -> list[str]:
        """What is told of one side."""
        return [text for who, text in self.found() if who == between]


def sound() -> Book:
    """Two lives in which everything agrees: refused, of several choices, cut off, taken over, sent again."""
    book = Book()
    book.open()
    book.refuse("bad", n=3)
    book.arrive("r1", 1, n=2)
    book.scrape(received=5, refused=3, accepted=2, live=2, waiting=2)
    book.end(1, "stop")
    book.arrive("r3", 3)
    book.arrive("r3", 3, decided=False)
    book.put(Ticked(3))
    book.put(Decided(3, "admitted", 3, ""))
    numbers = {"received": 6, "refused": 3, "accepted": 3, "finished": 1, "repeated": 1}
    book.scrape({"stop": 1}, **numbers, live=2, waiting=1, holding=1)
    book.open(NEXT)
    book.take_over(2, 3)
    book.end(2, "abort")
    book.end(3)
    book.scrape({"abort": 1, "length": 1}, recovered=2, finished=1, aborted=1)
    book.close(recovered=2, finished=1, aborted=1)
    return book


def test_what_agrees_is_said_to() -> None:
    """Three accounts per life, equal at each scrape; the sum over lives counts every choice once."""
    result = sound().check()
    assert result.agrees, result.findings
    assert not result.findings.notes
    assert (result.scrapes, result.lines) == (3, 7)
    first, second = result.lives
    assert first.account == Account(6, 3, 3, 0, 1, 0, 0, 1, 2, 1, 1)
    assert (first.closed, second.closed) == (False, True)
    assert second.account == second.metrics == Account(recovered=2, finished=1, aborted=1)


def test_every_equation_is_held_over_every_scrape() -> None:
    """A scrape that contradicts itself is told with both sides, and so is one that contradicts the journal."""
    book = sound()
    wrong = book.scrapes[1].account._replace(refused=2, live=1)
    book.scrapes[1] = book.scrapes[1]._replace(account=wrong)
    said = book.said("metrics")
    assert "received is 6, refused + accepted is 5" in said
    assert "accepted + recovered is 3, ended + live is 2" in said
    assert "live is 1, waiting + holding is 2" in said
    assert "refused is 2 in the metrics and 3 in the journal" in said


def test_ends_are_compared_by_reason() -> None:
    """The same number of ends for other reasons is no agreement."""
    book = sound()
    book.scrapes[2] = book.scrapes[2]._replace(ends=book.scrapes[2].ends | {"length": 0, "stop": 1})
    assert [between for between, _ in book.found()] == ["metrics"]


def test_a_failure_within_the_metrics_is_told() -> None:
    """Numbers behind it may be wrong however well they look."""
    book = sound()
    book.scrapes[2] = book.scrapes[2]._replace(failures=1)
    assert book.found() == [("metrics", "1 failures within metrics and log themselves")]


@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_a_missing_line_is_named(at: int) -> None:
    """Whichever line is gone, the record that it should tell of is named, with the life."""
    book = sound()
    told = json.loads(book.lines.pop(at))
    result = book.check()
    assert result.findings.kept[0].between == "log"
    words = told.get("id") if told["event"] == "Refused" else f"request {told['request']}"
    assert str(words) in result.findings.kept[0].text


def test_an_extra_line_and_a_changed_order_are_named() -> None:
    """A line twice has no record; two lines of one record in another order are told as that."""
    book = sound()
    book.lines.insert(3, book.lines[2])
    assert ("log", "the line of request 1, accepted has no record") in book.found()
    book = Book()
    book.open()
    book.arrive("r1", 1, n=2)
    book.put(Ticked(2))
    for request in (1, 2):
        book.put(Decided(2, "ended", request, "length"))
    for request in (2, 1):
        book.say("Finished", sequence=len(book.records), request=request, reason="length")
    assert [text for _, text in book.found()] == ["the lines up to record 6 are not in the order of decisions"]


def test_lines_of_which_the_log_says_that_they_are_lost_count() -> None:
    """One lost and announced agrees; two lost and one announced does not."""
    for lost, agrees in ((1, True), (2, False)):
        book = Book()
        book.open()
        for number in (1, 2):
            book.arrive(f"r{number}", number, line=number > lost)
        book.say("Anything", lines_dropped=1)
        book.end(1)
        book.end(2)
        book.scrape({"length": 2}, received=2, accepted=2, finished=2)
        book.close(received=2, accepted=2, finished=2)
        result = book.check()
        assert result.agrees is agrees
        assert result.lives[0].lines_lost == 1


def test_a_life_that_was_cut_may_lack_its_last_lines() -> None:
    """Without `Closed` that is a note, with it a finding; a daemon that goes on has not written them yet."""
    book = Book()
    book.open()
    book.arrive("r1", 1)
    book.end(1, line=False)
    result = book.check()
    assert result.agrees
    assert result.findings.notes == ["life 1 has no end: the lines of its last 1 events are missing"]
    assert result.lives[0].log is not None
    assert result.lives[0].log.live == 1
    book.close(received=1, accepted=1, finished=1)
    assert ("log", "request 1, ended (length) has no line") in book.found()


def test_a_life_may_be_cut_within_the_lines_of_one_iteration() -> None:
    """Of two ends in one iteration the second has no line: a note. Where it is the first one, a finding."""
    for told, agrees in ((1, True), (2, False)):
        book = Book()
        book.open()
        book.arrive("r1", 1, n=2)
        book.put(Ticked(2))
        for request in (1, 2):
            book.put(Decided(2, "ended", request, "length"))
        book.say("Finished", sequence=len(book.records), request=told, reason="length")
        assert book.check().agrees is agrees


def test_what_the_journal_lost_is_a_note_only_for_a_life_that_was_cut() -> None:
    """Lines and scrapes behind records that are not there: the machine died; after `Closed` nothing can be missing."""
    for closed in (False, True):
        book = Book()
        book.open()
        book.arrive("r1", 1)
        if closed:
            book.close(received=1, accepted=1)
        book.say("Finished", sequence=90, request=1, reason="length")
        book.scrapes.append(Scrape(LIFE, 90, Account(), {}))
        result = book.check()
        assert result.agrees is not closed
        text = " ".join([*result.findings.notes, *(one.text for one in result.findings.kept)])
        assert "1 lines of life 1 are true behind records" in text
        assert "1 scrapes of life 1 are of records" in text


def test_the_journal_is_held_against_itself() -> None:
    """An arrival without a decision, choices miscounted, an end that is none, numbers with a hole, wrong totals."""
    book = Book()
    book.open()
    book.arrive("r1", 1, decided=False)
    book.refuse("bad", n=3, said=1)
    book.arrive("r5", 5)
    book.end(5)
    book.end(5)
    book.close(received=9, refused=3, accepted=1, finished=1)
    said = book.said("journal")
    assert "request 'r1' of fe arrived and was not decided about" in said
    assert "request 'bad' has 3 choices, its decision says 1" in said
    assert "request 5 is accepted, 1 is the next number" in said
    assert "request 5 ends and is not live" in said
    assert "Closed says received 9, the records say 4" in said


def test_what_a_life_takes_over_is_what_was_left() -> None:
    """Behind a clean end nothing may appear or vanish; ends that are not believed are told apart."""
    book = Book()
    book.open()
    book.arrive("r1", 1)
    book.close(received=1, accepted=1)
    book.open(NEXT)
    book.take_over(7)
    assert [text for _, text in book.found()] == [
        "takes over 1 (7) that the life before did not leave, and lacks 1 (1) that it left"
    ]
    book = Book()
    book.open()
    book.arrive("r1", 1)
    book.end(1)
    book.open(NEXT)
    book.take_over(1)
    result = book.check()
    assert result.agrees
    assert result.lives[1].reopened == 1


def test_a_log_without_a_life_is_a_note() -> None:
    """Rotated away, or of another level: what is there is compared, what is not is said."""
    book = sound()
    del book.lines[:7]
    assert json.loads(book.lines[0])["event"] != "Opened"
    result = book.check()
    assert any("is not in the log" in note for note in result.findings.notes)


def test_a_scrape_is_read_as_the_daemon_exposes_it() -> None:
    """The real exposition gives the account back; one without a sample is refused by name."""
    metrics = Metrics()
    metrics.set_life(LIFE, CoreConfig())
    account = Account(5, 1, 4, 2, 3, 1, 0, 6, 2, 1, 1)
    metrics.written(77, account)
    metrics.ended(["stop", "length", "stop", "abort"])
    metrics.set_events({"refused_here": 8}, {})
    scrape = read_scrape(metrics.exposition())
    assert (scrape.life, scrape.sequence, scrape.account, scrape.door) == (LIFE, 77, account, 8)
    assert {reason: count for reason, count in scrape.ends.items() if count} == {"stop": 2, "length": 1, "abort": 1}
    with pytest.raises(NoScrape, match="journal_sequence"):
        read_scrape("# nothing\n")


def test_the_simulated_world_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests of all kinds through the daemon's own shell, over lives that are killed, fail and end: all the same."""
    fates = ("killed", "raised", "rest")
    run = simulate(tmp_path / "run", 240, 7, fates, bare_each=60)
    assert run.result.agrees, run.result.findings
    assert [fate for fate, _ in run.outcome.lives] == list(fates)
    assert run.result.scrapes > 20
    whole = [sum(column) for column in zip(*(life.account for life in run.result.lives), strict=True)]
    reached = dict(zip(Account._fields, whole, strict=True))
    assert min(reached[name] for name in ("refused", "finished", "aborted", "failed", "recovered", "repeated")) > 0
    assert command.main([str(tmp_path / "run"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [life["journal"] for life in document["lives"]] == [life.account._asdict() for life in run.result.lives]


@pytest.mark.parametrize("name", ["replies_counted", "not_followed", "abort_not_counted", "line_lost"])
def test_a_planted_fault_is_found(name: str) -> None:
    """Of each side one that the daemon once had, or could have; `bandmaster accounts --plants` has all of them."""
    planted = next(one for one in PLANTS if one.name == name)
    found = try_plant(planted)
    assert found.found, found.result.findings


def test_another_finding_than_the_expected_one_is_none() -> None:
    """Of the right side in other words, in the right words of another side or in another life: not what was planted."""
    planted = next(one for one in PLANTS if one.name == "not_followed")
    words = "request 7, ended (length) has no line"
    for between, life, text, found in (
        ("log", 2, words, True),
        ("log", 2, "finished is 3 in the log and 4 in the journal", False),
        ("metrics", 2, words, False),
        ("log", 1, words, False),
    ):
        result = Result()
        result.findings.add("journal", 1, 1, "something else")
        result.findings.add(between, life, 9, text)
        assert Found(planted, result).found == found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_simulated_world_at_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the command's and no life's: exit code 130, however many were still to come, and no directory is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sent: list[int] = []
    update = World.run

    def run(self: World, progress: Any = None) -> Any:
        def interrupt(done: int) -> None:
            sent.append(done)
            if len(sent) == 40:
                os.kill(os.getpid(), number)

        return update(self, interrupt)

    monkeypatch.setattr(World, "run", run)
    assert cli.main(["accounts", "--simulate", "5000"]) == cli.INTERRUPTED
    assert capsys.readouterr().err.endswith("bandmaster accounts: interrupted\n")
    assert 40 <= len(sent) < 400
    assert not list(tmp_path.iterdir())


def test_usage_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense, what is no journal, and a directory that is taken."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for arguments, words in (
        ([], "name one of"),
        (["x", "--plants"], "name one of"),
        ([str(tmp_path), "--for", "3"], "needs the --url"),
        (["--simulate", "5", "--url", "http://x"], "belong to a RUN_DIR"),
        (["--simulate", "5", "--keep", str(tmp_path / "full")], "name a new directory"),
        (["--plants", "--only", "nonsense"], "the plants are replies_counted"),
        ([str(tmp_path)], "no journal segments"),
    ):
        assert command.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_payload_of_a_test_record_is_real() -> None:
    """What `Book` writes is what a journal holds: it decodes to the same struct."""
    book = sound()
    assert all(msgspec.msgpack.decode(record.payload) for record in book.records)
    assert isinstance(book.records[0].decode(), Opened)
