"""Stages: a simulated world that is told what to do in commands, and the log of what it decided.

Owns the commands of scenarios and their words. Must never let a world go unjudged: every check watches it, and when it
closes it comes to rest with everything free.

Prompts are sums: `12` are tokens of the request's own, `s:40` the first 40 of a stream called s, `@a` all that request
a asked and was told, `@a:8` its first 8. Names may be ranges: `a0..a3` are four requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from allocator.columns import i64, pack_i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import Continued, Generate
from tools.worlds.checks import CHECKS, Checker
from tools.worlds.prompts import stream_tokens
from tools.worlds.rank_double import Shape
from tools.worlds.story import name_of, told
from tools.worlds.world import NEUTRAL, World, facts

QUIET = frozenset({"accepted"})  # what a command says itself
TURNS_MAX = 20_000
VOCAB_SIZE = 97
SMALL = CoreConfig(
    page_size=4, max_running_requests=4, max_batched_tokens=32, chunked_prefill_size=32, checkpoint_interval=8
)
SEND_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max": ("max_tokens", lambda text: None if text == "none" else int(text)),
    "min": ("min_tokens", int),
    "n": ("n", int),
    "priority": ("priority", int),
    "deadline": ("deadline_ms", int),
    "namespace": ("namespace", str),
    "store": ("store", lambda text: _switch(text)),
    "pin": ("pin_ms", int),
    "clip": ("clip", lambda text: _switch(text)),
    "stop": ("stop_ids", lambda text: pack_i64([int(token) for token in text.split(",")])),
}
"""Field of `send` -> field of `Generate`, and how its text is read."""


class BadCommand(Exception):
    """A command that means nothing, with what is wrong with it."""


class Stage:
    """One world and its log. `do` runs one command; the log grows by what was decided meanwhile."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.steps = False
        self.checkers: list[Checker] = []
        self._world: World | None = None

    @property
    def world(self) -> World:
        """The world; raises BadCommand before the `world` command."""
        if self._world is None:
            raise BadCommand("there is no world yet: `world` is the first command")
        return self._world

    def do(self, line: str) -> None:
        """Run one command; raises BadCommand, and whatever a check raises."""
        name, *words = line.split()
        command = COMMANDS.get(name)
        if command is None:
            raise BadCommand(f"there is no command {name!r}; they are {', '.join(sorted(COMMANDS))}")
        try:
            command(self, words)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BadCommand(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Clients come back and the world comes to rest with everything free; whatever does not raises."""
        self.world.settle()
        self.world.run(TURNS_MAX)
        for checker in self.checkers:
            checker.rest(self.world)
        self.world.check_rest()

    def hear(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Add to the log what an input led to."""
        self.log += [line for line in told(world, item, out, self.steps) if line.split()[1] not in QUIET]

    # --- the world ----------------------------------------------------------------------------------------------

    def begin(self, words: list[str]) -> None:
        """`world [FIELD=VALUE ...]`: the core's configuration, and pages, model_len, windows, state, stages."""
        if self._world is not None:
            raise BadCommand("there is a world already")
        fields = _fields(words)
        pages, model_len = int(fields.pop("pages", 64)), int(fields.pop("model_len", 512))
        windows = tuple(int(text) for text in fields.pop("windows", "").split(",") if text)
        stages = int(fields.pop("stages", 1))
        shape = Shape(windows, _switch(fields.pop("state", "off")))
        config = msgspec.convert(msgspec.to_builtins(SMALL) | fields, CoreConfig, strict=False)
        if unknown := sorted(set(fields) - set(CoreConfig.__struct_fields__)):
            fields_known = ", ".join(
                ("pages", "model_len", "windows", "state", "stages", *CoreConfig.__struct_fields__)
            )
            raise BadCommand(f"a world has no {', '.join(unknown)}; it has {fields_known}")
        self._world = World(config, pages=pages, model=facts(VOCAB_SIZE, model_len), shape=shape, stages=stages)
        self.checkers = [check(config, 0) for check in CHECKS.values()]
        self._world.watchers += [self.hear, *(checker.after for checker in self.checkers)]

    def log_steps(self, words: list[str]) -> None:
        """`steps on|off`: one line per step in the log."""
        (text,) = words
        self.steps = _switch(text)

    # --- front ends ---------------------------------------------------------------------------------------------

    def send(self, words: list[str]) -> None:
        """`send NAME ... prompt=SUM [max= min= n= priority= deadline= namespace= store= pin= clip= stop= fe=]`."""
        names, fields = [name for word in words if "=" not in word for name in _names(word)], _fields(words)
        prompt, frontend = fields.pop("prompt", "8"), fields.pop("fe", "fe")
        if unknown := sorted(set(fields) - set(SEND_FIELDS)):
            raise BadCommand(f"a request has no {', '.join(unknown)}; it has prompt, fe, {', '.join(SEND_FIELDS)}")
        known = {SEND_FIELDS[name][0]: SEND_FIELDS[name][1](text) for name, text in fields.items()}
        for name in names:
            tokens = pack_i64([token for part in prompt.split("+") for token in self._part(name, part)])
            self.world.arrive(
                Generate(id=name, prompt=tokens, sampling=NEUTRAL, **({"max_tokens": 4} | known)), frontend
            )

    def _part(self, name: str, part: str) -> list[int]:
        """One part of a prompt; see the module."""
        source, _, count = part.partition(":")
        if source.startswith("@"):
            client = self._client(source[1:])
            said = [*i64(client.generate.prompt).tolist(), *client.tokens[0]]
            return said[: int(count)] if count else said
        stream, length = (source, count) if count else (name, source)
        return stream_tokens(int.from_bytes(stream.encode(), "big"), int(length), VOCAB_SIZE)

    def _client(self, name: str) -> Any:
        for (_, id), client in self.world.clients.items():
            if id == name:
                return client
        raise BadCommand(f"no request {name!r} was accepted")

    def abort(self, words: list[str]) -> None:
        """`abort NAME ...`: their client hangs up."""
        for name in (name for word in words for name in _names(word)):
            self.world.abort(name, self._client(name).frontend)

    def finish(self, words: list[str]) -> None:
        """`finish NAME TOKENS`: the front end found a stop string behind so many output tokens."""
        name, tokens = words
        frontend = self._client(name).frontend
        self.world.feed(inputs.FinishAsked(self.world.now_ns, frontend, name, 0, int(tokens)))

    def lose(self, words: list[str]) -> None:
        """`lose FRONTEND`: it is gone for good."""
        (frontend,) = words
        self.world.feed(inputs.FrontEndLost(self.world.now_ns, frontend))

    # --- the loop -----------------------------------------------------------------------------------------------

    def tick(self, words: list[str]) -> None:
        """`tick [N]`: so many iterations, wanted or not."""
        for _ in range(_count(words)):
            self.world.tick()

    def report(self, words: list[str]) -> None:
        """`report [N]`: the oldest reports come back."""
        for _ in range(_count(words)):
            self.world.report()

    def turn(self, words: list[str]) -> None:
        """`turn [N]`: a tick where one is wanted, else a report."""
        for _ in range(_count(words)):
            self.world.turn()

    def run(self, words: list[str]) -> None:
        """`run`: until nothing happens any more."""
        self.world.run(TURNS_MAX)

    def until(self, words: list[str]) -> None:
        """`until VERDICT [NAME]`: turn until that is decided, of anybody or of one request; or until its stage."""
        wanted, name = words[0], words[1] if len(words) > 1 else None
        decided = len(self.world.decisions)
        for _ in range(TURNS_MAX):
            for one in self.world.decisions[decided:]:
                if one.verdict == wanted and name in (None, name_of(self.world, one.request)):
                    return
            if name is not None and self._stage(name) == wanted:
                return
            if not self.world.turn():
                break
        raise BadCommand("that never happens")

    def _stage(self, name: str) -> str:
        stages = {entry["id"]: str(entry["stage"]) for entry in self.world.core.view()["requests"]}
        return stages.get(name, "ended")

    def wait(self, words: list[str]) -> None:
        """`wait MS`: time passes; an engine wakes up for what is due."""
        (ms,) = words
        self.world.wait(int(ms))

    # --- operators ----------------------------------------------------------------------------------------------

    def control(self, order: str) -> None:
        """`flush_cache`, `drain`, `drain_expired`, `stop`: an operator's order."""
        self.world.feed(inputs.Controlled(self.world.now_ns, order))

    def epoch(self, words: list[str]) -> None:
        """`epoch`: the ranks are given up, whatever lives ends; and all begin again."""
        self.world.end_epoch(recovers=False)
        self.world.begin()

    def rank_dies(self, words: list[str]) -> None:
        """`rank_dies`: what had a row waits for the next epoch, which `ranks_come` begins."""
        self.world.end_epoch()

    def daemon_dies(self, words: list[str]) -> None:
        """`daemon_dies`: the next life takes over what had not ended, and has no ranks yet."""
        self.world.restart()

    def ranks_come(self, words: list[str]) -> None:
        """`ranks_come`: an epoch begins."""
        self.world.begin()

    def resume(self, words: list[str]) -> None:
        """`resume NAME [LOST]`: a front end comes back for a request; the newest tokens had not reached it."""
        frontend = self._client(words[0]).frontend
        out = self.world.resume(words[0], 0, _count(words[1:] or ["0"]), frontend)
        for message in (reply.message for reply in out.replies):
            if isinstance(message, Continued):
                self.log.append(f"{words[0]} holds={message.output_tokens} gets={len(message.tokens) // 8}")

    def journal(self, words: list[str]) -> None:
        """`journal on|off`: it promises durability, or cannot."""
        (text,) = words
        self.world.feed(inputs.JournalDegraded(self.world.now_ns, _switch(text), "disk full"))

    def show(self, words: list[str]) -> None:
        """`show requests`, `show memory`, `show NAME ...`: what lives, units per band, gauges by name."""
        gauges = self.world.core.gauges()
        for word in words:
            if word == "requests":
                self.log += list(self._requests())
            elif word == "memory":
                self.log += list(self._memory(gauges))
            elif word in gauges:
                self.log.append(f"{word} {gauges[word]}")
            else:
                raise BadCommand(f"there is no gauge {word!r}")

    def _requests(self) -> Iterator[str]:
        for one in self.world.core.view()["requests"]:
            held = " ".join(f"{band}={units}" for band, units in one["held_units"].items())
            extent = "..".join(map(str, one["extent"]))
            waits = f" waits_for={one['waits_for']}" if one["waits_for"] else ""
            yield f"{one['id']} {one['stage']} extent={extent} output={one['output_tokens']} {held}".rstrip() + waits

    def _memory(self, gauges: dict[str, int]) -> Iterator[str]:
        memory = self.world.core._state.memory
        for band in memory.chain.bands if memory is not None else ():
            parts = [f"{part}={gauges[f'{part}_units_{band.name}']}" for part in ("live", "cached", "reclaimable")]
            yield f"{band.name} {' '.join(parts)}"


def _orders(order: str) -> Callable[[Stage, list[str]], None]:
    return lambda stage, words: stage.control(order)


COMMANDS: dict[str, Callable[[Stage, list[str]], None]] = {
    "world": Stage.begin,
    "steps": Stage.log_steps,
    "send": Stage.send,
    "abort": Stage.abort,
    "finish": Stage.finish,
    "lose": Stage.lose,
    "tick": Stage.tick,
    "report": Stage.report,
    "turn": Stage.turn,
    "run": Stage.run,
    "until": Stage.until,
    "wait": Stage.wait,
    "epoch": Stage.epoch,
    "rank_dies": Stage.rank_dies,
    "daemon_dies": Stage.daemon_dies,
    "ranks_come": Stage.ranks_come,
    "resume": Stage.resume,
    "journal": Stage.journal,
    "show": Stage.show,
    **{order: _orders(order) for order in ("flush_cache", "drain", "drain_expired", "stop")},
}
"""Every command by name."""


def _fields(words: list[str]) -> dict[str, Any]:
    """The words of the form NAME=VALUE; `a:1,b:2` under a name in the plural of a table is a table."""
    fields: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            fields[name] = _table(text) if name == "cache_quotas" else _plain(text)
    return fields


def _plain(text: str) -> str:
    return {"on": "true", "off": "false"}.get(text, re.sub(r"(?<=\d)_(?=\d)", "", text))


def _table(text: str) -> dict[str, int]:
    pairs = (pair.rpartition(":") for pair in text.split(","))
    return {name: int(value) for name, _, value in pairs}


def _switch(text: str) -> bool:
    if text not in ("on", "off", "true", "false"):
        raise BadCommand(f"{text!r} is neither on nor off")
    return text in ("on", "true")


def _count(words: list[str]) -> int:
    return int(words[0]) if words else 1


def _names(word: str) -> list[str]:
    """A name, or a range of them: a0..a3."""
    found = re.fullmatch(r"(\D*)(\d+)\.\.(\D*)(\d+)", word)
    if found is None:
        return [word]
    if found[1] != found[3]:
        raise BadCommand(f"{word!r} is no range of names")
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[4]) + 1)]
