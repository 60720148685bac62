"""Visits: when requests used paths of the prefix tree, which of them went on, and what that says of those to come.

Owns the record of each visit and the chances learned from them: how likely a path is to be taken up again, by how many
turns it has had, by how much its newest request added to what it went on from, and by the time since.
Must never keep a float or read a clock: the time comes with inputs. Invariants: a visit is continued at most once;
every number is derived from the visits in the order in which they came, so that a replay learns the same.

    request ends      -> a visit of its path: its class, the time, its mark
    request begins    -> the newest visit on the path it found, or of a path that was evicted (a ghost), was continued

A visit's **mark** is the last multiple of 512 tokens before its prompt's end: what is before it, a later request that
goes on is sure to repeat; what lies behind it, the **tail** (the end of the prompt and the output), only where clients
send back exactly what they got. How often that is so is learned too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daemon.core.tree_nodes import Node

MARK_TOKENS = 512
GHOST_TOKENS = 64  # tokens before a mark that a path is known by once it was evicted
GHOSTS_MAX = 65_536
WAITING_MAX = 65_536  # visits watched for whether they go on, of all ages together
TURNS = 6  # turns told apart: the first to the fifth, and all later ones
ADDED_TOKENS = (1024, 3072, 8192)  # borders between what requests added
COLUMNS = len(ADDED_TOKENS) + 1
CLASSES = TURNS * COLUMNS
EDGES_MS = tuple(s * 1000 for s in (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096))
BUCKETS = len(EDGES_MS)
WIDTHS_MS = (*(high - low for low, high in pairwise(EDGES_MS)), EDGES_MS[-1])

MOMENT_MS = 1024  # rates are those of the last whole moment
ONE = 1 << 32  # scale of chances
RATE = 1 << 40  # scale of rates per millisecond
LEARN_EVERY = 64  # visits
SEEN_MAX = 4096  # of one class: then all counts are halved, so that old days weigh less
GUESS = 8  # visits that a guess weighs beside those of all classes, or a factor of one beside those of its classes
GUESSED_CHANCE = ONE // 20  # that a path is taken up in one of the buckets, before anything was learned
TAILS = 2  # continuations that the guess weighs that tails are found: they are what clients were sent
CHANCE_MAX = ONE - ONE // 20
PRIOR = 16  # visits that the chance of all classes, times a class's factor, weighs beside those of the class
ROUNDS = 3  # of fitting the factors of turns and of additions to one another


class Visit:
    """One request's use of a path: in which class, when, up to which token it is sure to be repeated.

    `line` is the number of the first visit of those that went on from one another, `again` how many tokens the same
    prompt would find at most, `end` the node at which the path ended and `end_tokens` how long it was. `over`: it was
    continued, or will not be. `watched` is the last bucket of ages in which it is counted as waiting:
    that it goes on later would stand beside none of those that did not.
    """

    __slots__ = ("added", "again", "end", "end_tokens", "ghost", "line", "mark", "over", "time_ms", "turn", "watched")

    def __init__(self, turn: int, added: int, line: int, time_ms: int) -> None:
        self.turn = turn
        self.added = added
        self.line = line
        self.mark = self.again = 0
        self.time_ms = time_ms
        self.over = False
        self.watched = BUCKETS - 1
        self.ghost = b""
        self.end: Node | None = None
        self.end_tokens = 0

    @property
    def class_(self) -> int:
        """Its place in the tables of chances."""
        return min(self.turn, TURNS - 1) * COLUMNS + bisect_right(ADDED_TOKENS, self.added)

    def content(self) -> list[Any]:
        """What the state digest covers."""
        end = self.end.serial if self.end is not None else 0
        return [
            self.turn,
            self.added,
            self.line,
            self.mark,
            self.again,
            self.time_ms,
            self.over,
            self.watched,
            end,
            self.end_tokens,
        ]


def mark_of(prompt_tokens: int) -> int:
    """The mark of a prompt; 0 for one that has none."""
    return max(0, prompt_tokens - 1) // MARK_TOKENS * MARK_TOKENS


def path_key(namespace: str, position: int, tokens: bytes) -> bytes:
    """What a path is known by at a mark: its place and the tokens (int64 column) before it."""
    return blake2b(namespace.encode() + position.to_bytes(8, "little") + tokens, digest_size=16).digest()


class Visits:
    """All visits of one tree; `now_ms` is the time of the newest input that had one."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.version = 0  # rises whenever the tables are made anew
        self._ghosts: dict[bytes, Visit] = {}  # by what their paths are known by at their marks, oldest first
        self._waiting: tuple[deque[Visit], ...] = tuple(deque() for _ in range(BUCKETS))  # by the bucket of their age
        self._watched = 0  # of those
        self._seen = [[0] * BUCKETS for _ in range(CLASSES)]  # visits not continued before they came to a bucket
        self._hit = [[0] * BUCKETS for _ in range(CLASSES)]  # visits continued in it
        self._tails = [TAILS, TAILS]  # continuations that found the tail of what they continued, and all of them
        self._lines = 0
        self._since = 0  # visits since the tables were made
        self._tail_share = ONE
        self._density: list[list[int]] = []
        self._best: list[int] = []
        self._learn()

    def enter(self, visit: Visit, ghost: bytes) -> None:
        """A request left its path; `ghost` is what the path is known by at the visit's mark, empty without one."""
        self.advance()
        visit.ghost = ghost
        if ghost:
            self._ghosts.pop(ghost, None)
            self._ghosts[ghost] = visit
            if len(self._ghosts) > GHOSTS_MAX:
                del self._ghosts[next(iter(self._ghosts))]
        self._waiting[0].append(visit)
        self._watched += 1
        self._forget_oldest()
        seen = self._seen[visit.class_]
        seen[0] += 1
        if seen[0] > SEEN_MAX:
            for counts in (*self._seen, *self._hit):
                counts[:] = [count // 2 for count in counts]
        self._since += 1
        if self._since >= LEARN_EVERY:
            self._since = 0
            self._learn()

    def new_line(self) -> int:
        """The number of a path that goes on from nothing."""
        self._lines += 1
        return self._lines

    def recall(self, key: bytes) -> Visit | None:
        """The newest visit of a path that is known by this, whether the path is still there or not."""
        visit = self._ghosts.get(key)
        return None if visit is None or visit.over else visit

    def continued(self, visit: Visit, at_ms: int, tail: bool | None) -> None:
        """A request went on from where this visit ended. `tail`: whether its tail was found, None when it was gone."""
        assert not visit.over, "a visit is continued once"
        self.advance()
        self.drop(visit)
        bucket = bucket_of(at_ms - visit.time_ms)
        if bucket <= visit.watched:
            self._hit[visit.class_][bucket] += 1
        if tail is not None:
            self._tails = [self._tails[0] + tail, self._tails[1] + 1]
            if self._tails[1] > SEEN_MAX:
                self._tails = [count // 2 for count in self._tails]

    def drop(self, visit: Visit) -> None:
        """This visit will not be continued."""
        visit.over = True
        if self._ghosts.get(visit.ghost) is visit:
            del self._ghosts[visit.ghost]

    def advance(self) -> None:
        """Visits that nobody continued grow older; amortized constant work per visit."""
        for bucket in range(BUCKETS - 1):
            waiting, border = self._waiting[bucket], EDGES_MS[bucket + 1]
            while waiting and self.now_ms - waiting[0].time_ms >= border:
                visit = waiting.popleft()
                if visit.over:
                    self._watched -= 1
                else:
                    self._seen[visit.class_][bucket + 1] += 1
                    self._waiting[bucket + 1].append(visit)

    @property
    def moment(self) -> tuple[int, int]:
        """As long as it is the same, so is every rate."""
        return self.version, self.now_ms // MOMENT_MS

    def rate(self, visit: Visit) -> int:
        """Uses to be expected per millisecond (times `RATE`) of the path of this visit."""
        return self._density[visit.class_][bucket_of(self.now_ms // MOMENT_MS * MOMENT_MS - visit.time_ms)]

    def tail_rate(self, visit: Visit) -> int:
        """The same of its tail."""
        return self.rate(visit) * self._tail_share // ONE

    def best_rate(self, visit: Visit) -> int:
        """The highest rate of any visit as old as this one."""
        return self._best[bucket_of(self.now_ms // MOMENT_MS * MOMENT_MS - visit.time_ms)]

    @property
    def newest_rate(self) -> int:
        """The highest rate of any visit that begins now."""
        return self._best[0]

    def content(self) -> list[Any]:
        """What the state digest covers."""
        waiting = [[visit.content() for visit in column] for column in self._waiting]
        ghosts = [[key, visit.line] for key, visit in self._ghosts.items()]
        return [
            self.now_ms,
            waiting,
            ghosts,
            self._seen,
            self._hit,
            self._tails,
            self._lines,
            self._since,
            self._density,
            self._tail_share,
        ]

    def _forget_oldest(self) -> None:
        """No more visits wait than a bound, whatever the rate of requests and the time that passes."""
        while self._watched > WAITING_MAX:
            bucket = next(bucket for bucket in range(BUCKETS - 1, -1, -1) if self._waiting[bucket])
            self._waiting[bucket].popleft().watched = bucket
            self._watched -= 1

    def _learn(self) -> None:
        """The tables anew: chances per class and age, then the rates that follow."""
        chances = _chances(self._seen, self._hit)
        self._density = [_density(row) for row in chances]
        self._best = [max(column) for column in zip(*self._density, strict=True)]
        self._tail_share = self._tails[0] * ONE // self._tails[1]
        self.version += 1


def bucket_of(age_ms: int) -> int:
    """The bucket of an age."""
    return bisect_right(EDGES_MS, max(0, age_ms)) - 1


def _chances(seen: list[list[int]], hit: list[list[int]]) -> list[list[int]]:
    """The chance (times `ONE`) that a visit of a class is continued in a bucket, if it was not before.

    That of all classes together, times factors for the turn and for what was added, fitted to one another, weighs
    `PRIOR` visits beside those of the class itself.
    """
    every = [
        (sum(row[b] for row in hit) * ONE + GUESS * GUESSED_CHANCE) // (sum(row[b] for row in seen) + GUESS)
        for b in range(BUCKETS)
    ]
    expected = [sum(count * chance for count, chance in zip(row, every, strict=True)) for row in seen]
    hits = [sum(row) for row in hit]
    by_turn, by_added = [ONE] * TURNS, [ONE] * COLUMNS
    for _ in range(ROUNDS):
        for turn in range(TURNS):
            cells = [turn * COLUMNS + added for added in range(COLUMNS)]
            by_turn[turn] = _factor(hits, expected, cells, by_added)
        for added in range(COLUMNS):
            cells = [turn * COLUMNS + added for turn in range(TURNS)]
            by_added[added] = _factor(hits, expected, cells, by_turn)
    rows = []
    for cell in range(CLASSES):
        factor = by_turn[cell // COLUMNS] * by_added[cell % COLUMNS] // ONE
        factor = factor * _factor(hits, expected, [cell], [factor]) // ONE
        row = []
        for bucket in range(BUCKETS):
            prior = every[bucket] * factor // ONE * PRIOR
            chance = (hit[cell][bucket] * ONE + prior) // (seen[cell][bucket] + PRIOR)
            row.append(min(chance, CHANCE_MAX))
        rows.append(row)
    return rows


def _factor(hits: list[int], expected: list[int], cells: list[int], others: list[int]) -> int:
    """How many times more continuations these cells had than expected (times `ONE`), drawn towards one."""
    had = sum(hits[cell] for cell in cells) + GUESS
    due = sum(expected[cell] * other // ONE for cell, other in zip(cells, others, strict=True)) + GUESS * ONE
    return had * ONE * ONE // due


def _density(chances: list[int]) -> list[int]:
    """Per bucket, the most uses per millisecond (times `RATE`) that waiting up to some later age can bring; it never
    rises with age, so that what was just used is worth no less than what waits for its likeliest time."""
    rates = [0] * BUCKETS
    for bucket in range(BUCKETS):
        alive, hits, time = ONE, 0, 0
        for later in range(bucket, BUCKETS):
            hit = alive * chances[later] // ONE
            hits += hit
            time += (2 * alive - hit) * WIDTHS_MS[later] // 2
            alive -= hit
            rates[bucket] = max(rates[bucket], hits * RATE // time)
    for bucket in range(BUCKETS - 2, -1, -1):
        rates[bucket] = max(rates[bucket], rates[bucket + 1])
    return rates
