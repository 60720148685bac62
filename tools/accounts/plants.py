"""Plants: ways in which a daemon may miscount, each made in a simulated world, each to be found.

Owns the table. Must never be part of a daemon that serves. Some of these the daemon once did itself.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from daemon.app import Daemon
from daemon.core.account import Account
from daemon.core.inputs import Arrived
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from ipc.messages import Finished
from tools.accounts.check import Result
from tools.accounts.finding import Finding
from tools.accounts.simulated import simulate
from tools.accounts.world.world import Plant

REQUESTS = 240
BARE_EACH = 40
FATES = ("killed", "rest")
EACH = 20  # every so many events one is wrong


class Planted(NamedTuple):
    """One fault: what is wrong, and the planting, made anew for each run.

    It must be found as what it is: of the side `between`, in words that match `says`, not before life `life`.
    """

    name: str
    about: str
    between: str
    says: str
    make: Callable[[], Plant]
    fates: tuple[str, ...] = FATES
    life: int = 1


class WrongLog:
    """A logger that passes `write(event, values, line)` every line; what that calls is written."""

    def __init__(self, log: Any, wrong: Callable[[str, dict[str, Any], Callable[..., None]], None]) -> None:
        self._log, self._wrong = log, wrong

    def __getattr__(self, level: str) -> Any:
        line = getattr(self._log, level)
        if level != "info":
            return line
        return lambda event, **values: self._wrong(event, values, line)


def _log(wrong: Callable[[str, dict[str, Any], Callable[..., None]], None]) -> Plant:
    def plant(daemon: Daemon) -> None:
        daemon.observer._log = WrongLog(daemon.observer._log, wrong)

    return plant


def _fed(wrong: Callable[[Daemon, Any, Any], None]) -> Plant:
    """What happens behind every input."""

    def plant(daemon: Daemon) -> None:
        feed = daemon.core.feed

        def feed_wrong(item: Any) -> Any:
            out = feed(item)
            wrong(daemon, item, out)
            return out

        daemon.core.feed = feed_wrong  # type: ignore[method-assign]

    return plant


def _account(wrong: Callable[[Daemon, Account], Account]) -> Plant:
    """What the core says that it counts."""

    def plant(daemon: Daemon) -> None:
        told = daemon.core.account
        daemon.core.account = lambda: wrong(daemon, told())  # type: ignore[method-assign]

    return plant


def _replies_counted() -> Plant:
    def plant(daemon: Daemon) -> None:
        take = daemon.observer._take

        def take_wrong(iteration: Any) -> None:
            take(iteration)
            for item, outputs in zip(iteration.inputs, iteration.outputs, strict=True):
                again = [one.message.reason for one in outputs.replies if isinstance(one.message, Finished)]
                if isinstance(item, Arrived):
                    daemon.metrics.ended(again)

        daemon.observer._take = take_wrong  # type: ignore[method-assign]

    return plant


def _line_lost() -> Plant:
    seen = count(1)

    def wrong(event: str, values: dict[str, Any], line: Callable[..., None]) -> None:
        if event != "Finished" or next(seen) % EACH:
            line(event, **values)

    return _log(wrong)


def _line_twice() -> Plant:
    seen = count(1)

    def wrong(event: str, values: dict[str, Any], line: Callable[..., None]) -> None:
        line(event, **values)
        if event == "Accepted" and not next(seen) % EACH:
            line(event, **values)

    return _log(wrong)


def _resumed_as_refused() -> Plant:
    newest = [0]

    def wrong(event: str, values: dict[str, Any], line: Callable[..., None]) -> None:
        newest[0] = values.get("sequence", newest[0])
        if event == "NotResumed":
            line("Refused", sequence=newest[0], n=1, **values)
        else:
            line(event, **values)

    return _log(wrong)


def _lines_swapped() -> Plant:
    kept: list[dict[str, Any]] = []

    def wrong(event: str, values: dict[str, Any], line: Callable[..., None]) -> None:
        if event == "Finished" and not kept:
            kept.append(values)
            return
        line(event, **values)
        if event == "Accepted" and kept:
            line("Finished", **kept[0] | {"sequence": values["sequence"]})

    return _log(wrong)


def _abort_not_counted() -> Plant:
    def wrong(daemon: Daemon, item: Any, out: Any) -> None:
        if any(one.verdict == Verdict.ENDED and one.reason == "abort" for one in out.decisions):
            daemon.core.state.totals.aborted -= 1

    return _fed(wrong)


def _refused_once() -> Plant:
    def wrong(daemon: Daemon, item: Any, out: Any) -> None:
        for one in out.decisions:
            if one.verdict == Verdict.REFUSED:
                daemon.core.state.totals.refused -= one.numbers["n"] - 1

    return _fed(wrong)


def _live_by_request() -> Plant:
    def wrong(daemon: Daemon, account: Account) -> Account:
        return account._replace(live=sum(1 for group in daemon.core.state.groups.values() if group.live))

    return _account(wrong)


def _carried_over() -> Plant:
    before: list[Account] = [Account()]
    newest: list[Account] = [Account()]

    def plant(daemon: Daemon) -> None:
        before[0], told = newest[0], daemon.core.account

        def more() -> Account:
            now = told()
            newest[0] = now._replace(
                received=now.received + before[0].received,
                refused=now.refused + before[0].refused,
                accepted=now.accepted + before[0].accepted,
                finished=now.finished + before[0].finished,
            )
            return newest[0]

        daemon.core.account = more  # type: ignore[method-assign]

    return plant


def _ahead() -> Plant:
    def plant(daemon: Daemon) -> None:
        refresh = daemon.refresh_metrics

        def refresh_wrong() -> None:
            refresh()
            daemon.metrics.written(daemon.observer._sequence - 30, daemon.core.account())

        daemon.refresh_metrics = refresh_wrong  # type: ignore[method-assign]

    return plant


def _not_followed() -> Plant:
    def plant(daemon: Daemon) -> None:
        observer = daemon.observer
        finished = observer._finished

        def finished_wrong(now_ns: int, message: Finished) -> None:
            if message.request in observer._times:
                finished(now_ns, message)

        observer._recovered = lambda item: None  # type: ignore[method-assign]
        observer._finished = finished_wrong  # type: ignore[method-assign, assignment]

    return plant


def _observer_fails() -> Plant:
    seen = count(1)

    def plant(daemon: Daemon) -> None:
        take = daemon.observer._take

        def take_wrong(iteration: Any) -> None:
            if not next(seen) % (10 * EACH):
                raise RuntimeError("by order of the plant")
            take(iteration)

        daemon.observer._take = take_wrong  # type: ignore[method-assign]

    return plant


def _wrong_reason() -> Plant:
    def plant(daemon: Daemon) -> None:
        ended = daemon.metrics.ended
        daemon.metrics.ended = lambda reasons: ended(  # type: ignore[method-assign]
            "length" if reason == "stop" else reason for reason in reasons
        )

    return plant


def _writer(wrong: Callable[[list[Any]], Iterable[Any]]) -> Plant:
    def plant(daemon: Daemon) -> None:
        append_all = daemon._writer.append_all
        daemon._writer.append_all = lambda batch: append_all(list(wrong(list(batch))))  # type: ignore[method-assign]

    return plant


def _decision_lost() -> Plant:
    seen = count(1)

    def wrong(payloads: list[Any]) -> Iterable[Any]:
        for one in payloads:
            ended = isinstance(one, Decided) and one.verdict == Verdict.ENDED
            if not ended or next(seen) != EACH:
                yield one

    return _writer(wrong)


def _decision_changed() -> Plant:
    def wrong(payloads: list[Any]) -> Iterable[Any]:
        for one in payloads:
            if isinstance(one, Decided) and one.verdict == Verdict.REFUSED and one.numbers["n"] > 1:
                yield msgspec.structs.replace(one, numbers=one.numbers | {"n": 1})
            else:
                yield one

    return _writer(wrong)


PLANTS = (
    Planted(
        "replies_counted",
        "ends are counted again where they are only told again",
        "metrics",
        r"ends by reason are .* in the metrics",
        _replies_counted,
    ),
    Planted(
        "line_lost",
        "some lines `Finished` are dropped in silence",
        "log",
        r"request \d+, ended \(\w+\) has no line",
        _line_lost,
    ),
    Planted(
        "line_twice",
        "some lines `Accepted` are written twice",
        "log",
        r"the line of request \d+, accepted has no record",
        _line_twice,
    ),
    Planted(
        "lines_swapped",
        "an end is told one request late",
        "log",
        r"the line of request \d+, ended \(\w+\) has no record",
        _lines_swapped,
    ),
    Planted(
        "resumed_as_refused",
        "who resumes what is not known is logged as refused",
        "log",
        r"the line of the refusal of .* \(unknown_request\) has no record",
        _resumed_as_refused,
    ),
    Planted(
        "abort_not_counted",
        "of several aborted choices one is not counted",
        "metrics",
        r"aborted is \d+ in the metrics",
        _abort_not_counted,
    ),
    Planted(
        "refused_once",
        "a refused request counts one, whatever its choices",
        "metrics",
        r"refused is \d+ in the metrics",
        _refused_once,
    ),
    Planted(
        "live_by_request",
        "the gauge of live ones counts requests, not choices",
        "metrics",
        r"live is \d+, waiting \+ holding is \d+",
        _live_by_request,
    ),
    Planted(
        "carried_over",
        "counters go on over the daemon's lives",
        "metrics",
        r"received is \d+ in the metrics",
        _carried_over,
        life=2,
    ),
    Planted(
        "ahead", "metrics name a record that they are ahead of", "metrics", r"received is \d+ in the metrics", _ahead
    ),
    Planted(
        "not_followed",
        "requests of an earlier life end without a line",
        "log",
        r"request \d+, ended \(\w+\) has no line",
        _not_followed,
        life=2,
    ),
    Planted(
        "observer_fails",
        "an error within the metrics costs an iteration",
        "metrics",
        r"\d+ failures within metrics and log themselves",
        _observer_fails,
    ),
    Planted(
        "wrong_reason",
        "ends by a stop token are counted as ends by length",
        "metrics",
        r"ends by reason are (?!.*'stop'.* in the metrics).* in the metrics, .*'stop'",
        _wrong_reason,
    ),
    Planted(
        "decision_lost",
        "an end is not in the journal",
        "journal",
        r"Closed says (finished|aborted|failed) \d+",
        _decision_lost,
        ("rest",),
    ),
    Planted(
        "decision_changed",
        "a refusal in the journal has one choice, not its own",
        "journal",
        r"has \d+ choices, its decision says 1",
        _decision_changed,
    ),
)


class Found(NamedTuple):
    """What came of one plant."""

    planted: Planted
    result: Result

    @property
    def expected(self) -> Finding | None:
        """The first finding that says of the right side what was planted, and not before it can be seen."""
        planted = self.planted
        kept = self.result.findings.kept
        told = [one for one in kept if one.between == planted.between and re.search(planted.says, one.text)]
        return told[0] if told and told[0].life >= planted.life else None

    @property
    def found(self) -> bool:
        """It was found as what it is; that something else was found does not count."""
        return self.expected is not None


def try_plant(planted: Planted, seed: int = 1, requests: int = REQUESTS) -> Found:
    """Run a small world with the fault in every life."""
    with tempfile.TemporaryDirectory(prefix="bandmaster-accounts-") as directory:
        run = simulate(Path(directory) / "run", requests, seed, planted.fates, planted.make(), bare_each=BARE_EACH)
        return Found(planted, run.result)
