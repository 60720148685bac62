"""Two journals side by side: what is only time or only a name is the same, and the first thing that is not is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.columns import pack_i32, pack_i64
from allocator.geometry import BandGeometry
from daemon.core.inputs import Reported
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from ipc.messages import Generate, Sampling
from journal.holders import Holders
from journal.reader import Record
from journal.records import Kind
from tools import replay
from tools.planted.records import WrongToken
from tools.planted.scene import Scene
from tools.replay_diff import Item, Rules, Side
from tools.simulate.engine import FACTS, GREEDY, Engine, Times, one_stage
from tools.simulate.recording import Recording

BANDS = [BandGeometry("full", "full", 64)]
Change = Callable[[Any], Any]


class Changed(Recording):
    """A recording in which records are replaced; None leaves one out."""

    change: Change = staticmethod(lambda payload: payload)

    def __init__(self, *arguments: Any, change: Change | None = None) -> None:
        super().__init__(*arguments)
        true, chosen = self._writer.append, change or (lambda payload: payload)

        def append(payload: Any) -> int:
            made = chosen(payload)
            return true(made) if made is not None else 0

        self._writer.append = append  # type: ignore[method-assign,assignment]
        self._writer.append_all = lambda payloads: [append(one) for one in payloads]  # type: ignore


def run(
    directory: Path,
    name: str = "r",
    start_ns: int = 0,
    change: Change | None = None,
    config: CoreConfig | None = None,
    pages: int = 60,
    order: tuple[int, ...] = (0, 1, 2, 3),
    seed: int | None = None,
    temperature: float = 0.0,
) -> Path:
    """Four requests on a small daemon, closed."""
    config = config or CoreConfig(page_size=4, max_running_requests=4, chunked_prefill_size=16)
    with Changed(directory, config, change=change) as recording:
        engine = Engine(config, one_stage(BANDS, 4, 64 * pages), FACTS, Times(), recording=recording)
        engine.advance(start_ns)
        for number in order:
            sampling = GREEDY if not temperature else Sampling(temperature=temperature)
            prompt = pack_i64(range(100 * number, 100 * number + 20))
            engine.submit(Generate(f"{name}{number}", prompt, sampling, max_tokens=12), seed)
        engine.run()
        recording.close(engine.now_ns, "the end", engine.core)
    return directory


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code, and what was said in JSON."""
    code = replay.main(["diff", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_is_only_time_or_a_name_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other moments, ids and drawn seeds of greedy requests are no difference unless they are asked for."""
    one, two = run(tmp_path / "a", "r", 0, seed=5), run(tmp_path / "b", "other", 77_000_000, seed=5)
    code, said = diff(capsys, one, two)
    assert code == 0, said["first"]
    assert said["first"] is None
    assert min(said["equal"].values()) > 4
    code, said = diff(capsys, one, two, "--times")
    assert code == 1
    assert "now_ns" in said["first"]["path"]
    code, said = diff(capsys, one, two, "--names")
    assert code == 1
    assert "generate.id: 'r0' | 'other0'" in said["first"]["path"]


@pytest.mark.parametrize(("temperature", "code"), [(0.0, 0), (1.0, 1)])
def test_a_drawn_seed_counts_where_it_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float, code: int
) -> None:
    """The same tokens from other seeds: greedy requests are the same, sampled ones were asked something else."""
    same = staticmethod(lambda item: _tokens(item))
    one = run(tmp_path / "a", seed=5, temperature=temperature, change=same)
    two = run(tmp_path / "b", seed=6, temperature=temperature, change=same)
    got, said = diff(capsys, one, two)
    assert got == code, said["first"]
    if code:
        assert said["first"]["path"] == "seed: 5 | 6"


def _tokens(item: Any) -> Any:
    """A report of tokens that do not depend on seeds."""
    return msgspec.structs.replace(item, tokens=bytes(len(item.tokens))) if isinstance(item, Reported) else item


def test_settings_are_told_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fed alike and set otherwise: the first decision that differs, its request, and which settings differ."""
    small = CoreConfig(page_size=4, max_running_requests=2, chunked_prefill_size=16)
    code, said = diff(capsys, run(tmp_path / "a", seed=5), run(tmp_path / "b", config=small, pages=50, seed=5))
    assert code == 1
    first = said["first"]
    assert first["stream"] in ("decisions", "steps")
    assert "settings or versions" in said["means"]
    assert "max_running_requests: 4 | 2" in said["settings"]
    assert any("arena bytes: 3840 | 3200" in line for line in said["settings"])
    assert said["before"]
    assert said["by_stream"]["decisions"]["path"]


def test_an_input_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first arrival that is not the same, both places, and what differs in it; the streams each by itself."""

    def longer(item: Any) -> Any:
        generate = getattr(item, "generate", None)
        if generate is None or generate.id != "r2":
            return item
        return msgspec.structs.replace(item, generate=msgspec.structs.replace(generate, max_tokens=13))

    code, said = diff(capsys, run(tmp_path / "a"), run(tmp_path / "b", change=longer))
    assert code == 1
    assert said["first"]["stream"] == "inputs"
    assert said["first"]["path"] == "generate.max_tokens: 12 | 13"
    assert said["first"]["left_place"].startswith("0000000001.kvj at byte")
    assert "fed differently" in said["means"]
    assert said["by_stream"]["decisions"] is None


def test_another_order_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two arrivals the other way round: both sides have both."""
    code, said = diff(capsys, run(tmp_path / "a", seed=5), run(tmp_path / "b", order=(0, 2, 1, 3), seed=5))
    assert code == 1
    assert "another order" in said["means"]
    assert said["equal"]["inputs"] >= 2


def test_a_token_is_put_to_its_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that differs in one token names the request on that row, on either side."""
    Scene(WrongToken(), tmp_path / "a").make()
    fault = WrongToken()
    truth = Scene(fault, tmp_path / "a2").make()
    with_none = WrongToken()
    with_none.change = lambda scene, payload: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="no occasion"):
        Scene(with_none, tmp_path / "b").make()
    code, said = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    first = said["first"]
    assert (first["stream"], first["step"]) == ("inputs", truth.step)
    assert first["path"].startswith("tokens[1]: 12 | 7")
    assert first["left_requests"] == first["right_requests"] == [truth.request]
    assert all("Decided" in line for line in said["left_story"])


def test_beside_a_row_that_nobody_is_known_on_the_others_keep_their_places() -> None:
    """As behind a trimmed part: the request of a token is the one on its own row, or none."""
    geometry = one_stage(BANDS, 4, 64 * 60)
    side = Side("", 0, Rules(), None, holders=Holders(geometry, 4))  # type: ignore[arg-type]
    assert side.holders is not None
    side.holders.enter(5, 1, 1)
    side.holders.enter(7, 2, 1)
    report = Reported(0, 1, 1, pack_i32([0, 1, 2]), pack_i32([1, 1, 1]), pack_i64([9, 9, 9]))
    item = Item(Record(1, int(Kind.REPORTED), b"", "", 0), "inputs", report, report)
    assert [side.about(item, -1, row) for row in (-1, 0, 1, 2, 3)] == [[], [], [5], [7], []]


def test_one_that_ends_before_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one side has nothing more, the other's next record is shown."""

    def without(item: Any) -> Any:
        return None if isinstance(item, Decided) and item.verdict == "ended" and item.request == 4 else item

    code, said = diff(capsys, run(tmp_path / "a"), run(tmp_path / "b", change=without))
    assert code == 1
    assert said["by_stream"]["decisions"] is not None
    assert "ended" in said["first"]["left"]


def test_two_lives_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lives of one journal, or one life of two journals; a life that is not there is said."""
    run(run(tmp_path / "a", seed=5), "again", seed=5)
    code, said = diff(capsys, tmp_path / "a", "--life", "1,2")
    assert code == 0, said["first"]
    code, said = diff(capsys, tmp_path / "a", run(tmp_path / "b", seed=5), "--life", "2,1")
    assert code == 0, said["first"]
    assert replay.main(["diff", str(tmp_path / "a"), "--life", "1,3"]) == 2
    assert "there is no life 3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        replay.main(["diff", str(tmp_path / "a")])
    assert "name two of its lives" in capsys.readouterr().err


def test_the_text_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people: what it means, both records, and each stream; a directory without a journal is usage."""
    one, two = run(tmp_path / "a", seed=5), run(tmp_path / "b", order=(1, 0, 2, 3), seed=5)
    assert replay.main(["diff", str(one), str(two)]) == 1
    shown = capsys.readouterr().out
    assert "DIFFER in inputs" in shown
    assert f"{one}: sequence" in shown
    assert "each stream by itself:" in shown
    assert replay.main(["diff", str(one), str(one)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert replay.main(["diff", str(one), str(tmp_path / "nothing")]) == 2
    path = next(two.glob("*.kvj"))
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    assert replay.main(["diff", str(two), str(two)]) == 4
