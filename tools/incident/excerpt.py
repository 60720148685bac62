"""Excerpt: which part of a journal an archive takes, and what must be known of it before it can be redacted.

Owns the places where a journal can begin: its first record, or the record behind a snapshot. Must never take a part
that cannot be replayed from where it begins, nor change the journal. Invariant: what an excerpt yields are sound
records without a gap; where that ends before the journal does, `damage` says at what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from daemon.core.inputs import Arrived, EpochBegan, Recovered
from daemon.core.state import CoreState
from daemon.core.tree_paths import _known_from
from daemon.core.visits import MARK_TOKENS, path_key
from ipc.messages import Generate
from journal.reader import Finding, Record, Walk, readable_segments
from journal.records import DECISION_VERSION, Kind, Opened
from journal.recovery import Decision
from journal.segment import ARCHIVE_SUFFIX, load_header, segment_behind
from journal.snapshots import Body, Header, SnapshotUnusable, decode_body, load, snapshot_names
from journal.snapshots import load_header as snapshot_header
from journal.storage import DiskStorage
from tools.replica import factories

MISSING = "segment_missing"  # of the recovery table


@dataclass(frozen=True, slots=True)
class Beginning:
    """A place where an archive's journal can begin: behind record `sequence`, 0: at its first, in segment `first`.

    `size_bytes` is how much of the journal's files stands from there on.
    """

    sequence: int
    first: int
    size_bytes: int


@dataclass(slots=True)
class Excerpt:
    """The records from a beginning on. `damage` is set once they were read as far as they are sound."""

    storage: DiskStorage
    beginning: Beginning
    damage: Finding | None = None
    torn: list[str] = field(default_factory=list)
    last_sequence: int = 0

    def records(self) -> Iterator[Record]:
        """Sound records in order, up to the first damage; a torn tail is no damage."""
        self.damage, self.torn = None, []
        walk = Walk(self.storage, first=self.beginning.first, tolerant=True)
        for record in walk.records():
            self.damage = next((found for found in walk.findings if _ends(found, record.file)), None)
            if self.damage is not None:
                return
            if record.sequence > self.beginning.sequence:
                self.last_sequence = record.sequence
                yield record
        self.damage = next((found for found in walk.findings if found.row.decision is Decision.REFUSE), None)
        self.torn = [found.text() for found in walk.cuts()]


def _ends(found: Finding, file: str) -> bool:
    """Whether a finding is in front of what stands in a file."""
    if found.row.decision is not Decision.REFUSE:
        return False
    return found.row.label != MISSING or file.partition(".")[0] >= found.file.partition(".")[0]


def beginnings(storage: DiskStorage) -> tuple[list[Beginning], list[str]]:
    """Where an archive of this journal can begin, oldest first, and notes about snapshots that cannot be used."""
    row, notes = readable_segments(storage), list[str]()
    sizes = {number: _size(storage, name) for number, name in row.items()}
    found = []
    if next(iter(row), 0) == 1:
        found.append(Beginning(0, 0, sum(sizes.values())))
    oldest = load_header(storage, next(iter(row.values())))
    least = oldest.first_sequence - 1 if oldest is not None else 0
    for sequence, name in snapshot_names(storage.names()).items():
        try:
            header = snapshot_header(storage, name)
        except (SnapshotUnusable, OSError) as error:
            notes.append(f"not used: {error}")
            continue
        if sequence < least or header.decision_version != DECISION_VERSION:
            continue
        first = segment_behind(storage, sequence)
        found.append(Beginning(sequence, first, sum(size for number, size in sizes.items() if number >= first)))
    return found, notes


def all_of(storage: DiskStorage) -> Beginning:
    """Everything that is there, of a journal that nothing can be begun at: to be taken as it is."""
    return Beginning(0, 0, sum(_size(storage, name) for name in readable_segments(storage).values()))


def _size(storage: DiskStorage, name: str) -> int:
    """Bytes of a segment's file, which a running daemon may just have compressed."""
    path = storage.directory / name
    if not path.exists():
        path = path.with_name(path.name + ARCHIVE_SUFFIX)
    return path.stat().st_size


def chosen(found: list[Beginning], last_bytes: int) -> int:
    """Which beginning leaves at most so many bytes of the journal's files; the newest where none does."""
    return next((at for at, one in enumerate(found) if one.size_bytes <= last_bytes), len(found) - 1)


def load_start(storage: DiskStorage, sequence: int) -> tuple[Header, Body]:
    """The snapshot behind a record; raises SnapshotUnusable."""
    header, body = load(storage, snapshot_names(storage.names())[sequence])
    return header, decode_body(body)


def life_first(storage: DiskStorage, beginning: Beginning) -> int:
    """The first record of the life that a beginning lies in."""
    names = readable_segments(storage)
    header = load_header(storage, names[beginning.first]) if beginning.first in names else None
    return header.life_first if header is not None else 1


# --- what must be known before ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """What a first reading found. `paths`: by an evicted path's digest, the namespace and tokens that lead there."""

    vocabularies: set[int] = field(default_factory=set)
    eos_ids: set[int] = field(default_factory=set)
    stop_ids: set[int] = field(default_factory=set)
    page_sizes: set[int] = field(default_factory=set)
    snapshots: int = 0
    records: int = 0
    paths: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)


class FirstReading:
    """Looks through an excerpt for the vocabulary, the ids that end requests, and prompts of evicted paths."""

    def __init__(self, start: tuple[Header, Body] | None) -> None:
        self.known = Known()
        self._ghosts: frozenset[bytes] = frozenset()
        self._page_size = 0
        if start is not None:
            self._look_into(start[1])

    def _look_into(self, body: Body) -> None:
        """What a snapshot says: it stands for all that came before."""
        core: Any = factories().resume(body).core
        state: CoreState = core.state
        assert state.facts is not None, "a snapshot is taken in an epoch"
        self._facts(state.facts)
        self.known.page_sizes.add(state.config.page_size)
        for group in state.groups.values():
            self.known.stop_ids.update(group.stop_ids.tolist())
        cache = state.memory.cache if state.memory is not None else None
        if cache is not None and cache._tree.visits is not None:
            self._ghosts, self._page_size = frozenset(cache._tree.visits._ghosts), cache.page_size
        for request in state.requests.values():
            self._paths(request.group.namespace, request.group.prompt.tobytes() + state.output_of(request))

    def take(self, record: Record) -> None:
        """Look at one record."""
        known = self.known
        known.records += 1
        if record.kind == Kind.SNAPSHOTTED:
            known.snapshots += 1
        elif record.kind in (Kind.OPENED, Kind.EPOCH_BEGAN, Kind.ARRIVED, Kind.RECOVERED):
            payload: Any = record.decode()
            if isinstance(payload, Opened):
                known.page_sizes.add(payload.core.page_size)
            elif isinstance(payload, EpochBegan):
                self._facts(payload.facts)
            elif isinstance(payload, Arrived):
                self._generate(payload.generate)
            elif isinstance(payload, Recovered):
                for group in payload.groups:
                    self._generate(group.generate)

    def _facts(self, facts: Any) -> None:
        self.known.vocabularies.add(facts.vocab_size)
        self.known.eos_ids.update(facts.eos_ids)

    def _generate(self, generate: Generate) -> None:
        ids = generate.stop_ids
        if len(ids) % 8 == 0:
            self.known.stop_ids.update(memoryview(ids).cast("q").tolist())
        if self._ghosts:
            self._paths(generate.namespace, generate.prompt)

    def _paths(self, namespace: str, tokens: bytes) -> None:
        """Evicted paths that a sequence goes along."""
        for position in range(MARK_TOKENS, len(tokens) // 8 + 1, MARK_TOKENS):
            begin = _known_from(position, self._page_size)
            key = path_key(namespace, position, tokens[8 * begin : 8 * position])
            if key in self._ghosts:
                self.known.paths.setdefault(key, (namespace, tokens[: 8 * position]))


def mapped_paths(known: Known, page_size: int, column: Callable[[str, bytes], tuple[str, bytes]]) -> dict[bytes, bytes]:
    """Digests of evicted paths as the mapped prompts have them."""
    ghosts = {}
    for key, (namespace, tokens) in known.paths.items():
        name, mapped = column(namespace, tokens)
        position = len(tokens) // 8
        ghosts[key] = path_key(name, position, mapped[8 * _known_from(position, page_size) :])
    return ghosts
