"""What-if over lives and epochs that end, journals that were cut, and ones that a daemon still writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.core import inputs
from daemon.core.outputs import Outputs
from tests.tools.test_whatif_replays import ask, same
from tests.tools.whatif_runs import CONFIG, FACTS, FULL, TIMES, geometry_of, lengths, requests
from tools.simulate.engine import NS_PER_S, Engine, Times
from tools.simulate.recording import Recording
from tools.whatif.command import main

GEOMETRY = geometry_of(FULL, 40_960)
DOWN_NS = 700_000_000
WARM_NS = 400_000_000


class Later(Engine):
    """An engine that goes on where another one was when its daemon died."""

    def __init__(self, before: Engine, recording: Recording) -> None:
        self._left: Any = (before.core.recoverable(), before.core.next_request)
        self._starts_ns = before.now_ns + DOWN_NS
        super().__init__(CONFIG, GEOMETRY, FACTS, TIMES, tokens=lengths, recording=recording)
        self.sent, self._by_number = before.sent, before._by_number

    def feed(self, item: inputs.Input) -> Outputs:
        """What was left comes in front of the first epoch."""
        if self._left is not None and isinstance(item, inputs.EpochBegan):
            (groups, next_request), self._left = self._left, None
            self.now_ns = self._starts_ns
            super().feed(inputs.Recovered(self.now_ns, groups, next_request))
            self.now_ns += 5_000_000
            item = inputs.EpochBegan(self.now_ns, 1, GEOMETRY, FACTS)
        return super().feed(item)


def lose_ranks(engine: Engine, epoch: int) -> None:
    """An epoch ends, what is in flight with it, and another one begins later."""
    engine._due.clear()
    engine._device_free_ns = 0
    engine.feed(inputs.EpochEnded(engine.now_ns, epoch, "a rank died", recovers=True))
    engine.advance(engine.now_ns + DOWN_NS)
    engine.feed(inputs.EpochBegan(engine.now_ns, epoch + 1, GEOMETRY, FACTS))


def submit_until(engine: Engine, traffic: list[Any], until_ns: int) -> list[Any]:
    """The requests that come until then; the rest."""
    coming = [one for one in traffic if one[0] < until_ns]
    for at_ns, generate, seed, _ in coming:
        engine.advance(max(engine.now_ns, NS_PER_S + at_ns))
        engine.submit(generate, seed)
    return traffic[len(coming) :]


def recording_of(path: Path) -> Recording:
    """One life of a journal."""
    return Recording(path, CONFIG)


def test_lives_and_epochs_end_in_the_replay_as_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks die in the midst of work, the daemon dies in the midst of work; every figure comes out as recorded."""
    traffic = requests(7, 70, patient=True)
    with recording_of(tmp_path) as recording:
        engine = Engine(CONFIG, GEOMETRY, FACTS, TIMES, tokens=lengths, recording=recording)
        rest = submit_until(engine, traffic, 500_000_000)
        assert engine.state.live
        lose_ranks(engine, 1)
        rest = submit_until(engine, rest, 900_000_000)
        assert engine.state.live
    with recording_of(tmp_path) as recording:
        later = Later(engine, recording)
        submit_until(later, rest, 1 << 60)
        later.run()
        recording.close(later.now_ns, "served", later.core)
    found = ask(capsys, str(tmp_path))
    recorded, unchanged = found["runs"]["recorded"], found["runs"]["unchanged"]
    assert (found["lives"], found["epochs"]) == (2, 3)
    assert recorded["requests"] == sum(one.n for one in later.sent.values())
    assert recorded["requeues"] > 2
    assert same(recorded, unchanged) == {}
    ranks, daemon = "lost once, for 700 ms in all", "started again once, and for 705 ms in all"
    for words in (ranks, daemon):
        (note,) = [note for note in found["notes"] if words in note]
        assert "in the replays, at the same moments" in note


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """The journal of a run in whose midst nobody looks any more: a daemon that lives, or one that just died."""
    with recording_of(tmp_path) as recording:
        engine = Engine(CONFIG, GEOMETRY, FACTS, TIMES, tokens=lengths, recording=recording)
        submit_until(engine, requests(8, 60, patient=True), 1 << 60)
        assert engine.state.live > 3
    return tmp_path


def test_what_still_lives_counts_up_to_the_end_of_the_record(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A journal without an end is replayed as far as it goes, not to a rest that nobody saw."""
    found = ask(capsys, str(cut))
    assert found["runs"]["recorded"]["live"] > 3
    assert same(found["runs"]["recorded"], found["runs"]["unchanged"]) == {}
    assert any("counted up to its end" in note for note in found["notes"])


def test_a_torn_tail_is_left_out_and_told(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last bytes are missing: the rest is read, a note says what is not."""
    segment = cut / "0000000001.kvj"
    segment.write_bytes(segment.read_bytes()[:-11])
    found = ask(capsys, str(cut))
    assert any("torn tail" in note for note in found["notes"])


def test_damage_has_its_own_exit_code(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A segment that is damaged and not the last is refused with 4, no journal at all with 2."""
    with recording_of(cut):
        pass
    segment = cut / "0000000001.kvj"
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 4
    segment.write_bytes(bytes(data))
    assert main([str(cut)]) == 4
    assert segment.name in capsys.readouterr().err
    assert main([str(cut / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_a_journal_without_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to replay, and no epoch in a journal whose ranks never came."""
    with recording_of(tmp_path / "a"):
        pass
    with recording_of(tmp_path / "b") as recording:
        Engine(CONFIG, GEOMETRY, FACTS, TIMES, recording=recording).run()
    for name, words in (("a", "no epoch"), ("b", "no request ever came")):
        assert main([str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err


class WarmsUp(Times):
    """Ranks whose very first forward takes longer."""

    calls = 0

    def forward_ns(self, prompt_tokens: int, decoding: int) -> int:
        """Nanoseconds of one forward."""
        WarmsUp.calls += 1
        return super().forward_ns(prompt_tokens, decoding) + WARM_NS * (WarmsUp.calls == 1)


def test_an_epochs_first_forward_is_as_slow_in_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody who came in the first second waits for it: the replay has that, and no other forward is slower."""
    WarmsUp.calls = 0
    with recording_of(tmp_path) as recording:
        engine = Engine(CONFIG, GEOMETRY, FACTS, WarmsUp(*TIMES), tokens=lengths, recording=recording)
        submit_until(engine, requests(7, 70, patient=True), 1 << 60)
        engine.run()
        recording.close(engine.now_ns, "served", engine.core)
    found = ask(capsys, str(tmp_path))
    pace = found["paces"]["recorded"]
    assert pace["warm_ns"] == pytest.approx(WARM_NS, rel=0.02)
    assert pace["fixed_ns"] == pytest.approx(TIMES.step_ns, rel=0.02)
    assert abs(found["off"]["unchanged"]["waiting, mean"]) < 0.01
    assert abs(found["off"]["unchanged"]["time to first token, mean"]) < 0.01
