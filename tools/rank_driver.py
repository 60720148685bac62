"""A small daemon for one rank: a real logical chain in front of a real step worker, no sockets.

Owns page and slot taking, table entries, retirement behind windows and step columns as the core makes them, for
benchmarks and tests of a rank alone. It keeps what each row should hold, so that a caller states only which rows do
what. Must never be used to serve.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from allocator.columns import i32, i64, pack_i32, pack_i64
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.ops import Flush, Op
from daemon.rank.runner import Runner, open_runner
from daemon.rank.step_worker import StepWorker
from ipc.messages import EXPLICIT, SAMPLE, Begin, Forward, RankSettings, Report, RowSampling, Sampling, Step


def settings(**changes: object) -> RankSettings:
    """Settings of a small modeled rank."""
    values: dict[str, object] = {
        "model_path": "",
        "model_name": "test",
        "dtype": "auto",
        "page_size": 4,
        "max_running_requests": 8,
        "max_batched_tokens": 256,
        "max_model_len": 0,
        "arena_bytes": 1 << 18,
        "mem_fraction_ppm": 0,
        "runner": "modeled",
        "threads": 1,
        "invariants": 2,
    }
    return RankSettings(**(values | changes))  # type: ignore[arg-type]


@dataclass
class RowState:
    """A row as the daemon sees it."""

    generation: int = -1
    length: int = 0
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # prompt given so far, then what was sampled
    slot: int = 0  # working state slot; 0: none
    retired: dict[int, int] = field(default_factory=dict)  # per window band: pages whose unit was freed


class Driver:
    """Owner of the logical chain and of the step numbers; `steps` keeps every step sent."""

    def __init__(self, config: RankSettings, runner: Runner | None = None) -> None:
        self.runner = runner or open_runner(config, 0, 0)
        self.prepared = self.runner.prepare()
        self.geometry = Geometry(
            config.page_size, self.prepared.virtual_pages, self.prepared.virtual_slots, [self.prepared.geometry]
        )
        length = self.prepared.facts.max_model_len
        self.worker = StepWorker(self.runner, Begin(1, self.geometry), config, length, 0, 0)
        self.chain = LogicalChain(self.geometry)
        self.bands = self.prepared.geometry.bands
        self.owner = len(self.bands) - 1
        self.state = next((index for index, band in enumerate(self.bands) if band.kind == "state"), -1)
        self.windows = [index for index, band in enumerate(self.bands) if band.kind == "window"]
        self.rows = {row: RowState() for row in range(config.max_running_requests)}
        self.seq = 0
        self.newest_forward = 0
        self.steps: list[Step] = []
        self.reports: list[Report] = []
        self._ops: list[Op] = []
        self._fresh: list[RowSampling] = []

    def start(self, row: int, sampling: Sampling | None = None, **more: object) -> None:
        """A new generation of a row; greedy without `sampling`; `more` are fields of RowSampling."""
        state = self.rows[row]
        assert not state.pages, f"row {row} was not ended"
        self.rows[row] = RowState(state.generation + 1, slot=self._take_slot())
        wanted = sampling or Sampling(temperature=0.0, seed=0)
        values: dict[str, object] = {"choice": 0} | more
        self._fresh.append(RowSampling(row, state.generation + 1, wanted, **values))  # type: ignore[arg-type]

    def _take_slot(self) -> int:
        if self.state < 0:
            return 0
        taken = self.chain.take(tuple(int(band == self.state) for band in range(self.owner + 1)))
        self._ops.append(taken.op)
        return int(taken.ids[self.state][0])

    def end(self, row: int) -> None:
        """Free a row's pages, window units and slot in the next step."""
        state = self.rows[row]
        parts = self._parts()
        if state.pages:
            parts[self.owner] = np.array(sorted(state.pages), dtype=np.int32)
        for band in self.windows:
            parts[band] = np.array(sorted(state.pages[state.retired.get(band, 0) :]), dtype=np.int32)
        if state.slot:
            parts[self.state] = np.array([state.slot], dtype=np.int32)
        if any(part is not None and part.size for part in parts):
            self._ops.append(self.chain.free(parts))
        state.pages, state.slot, state.retired = [], 0, {}

    def _parts(self) -> list[np.ndarray | None]:
        return [None] * len(self.bands)

    def _retire(self, row: int) -> None:
        """Free the window units that no position from the row's next one on sees."""
        state = self.rows[row]
        for band in self.windows:
            seen = max(state.length + 1 - self.bands[band].window_tokens, 0) // self.geometry.page_size
            gone = state.pages[state.retired.get(band, 0) : seen]
            if gone:
                parts = self._parts()
                parts[band] = np.array(sorted(gone), dtype=np.int32)
                self._ops.append(self.chain.free(parts))
                state.retired[band] = seen

    def flush(self, moves_max: int) -> None:
        """Ask for compaction in the next step."""
        self._ops.append(Flush(moves_max))

    def _grow(self, row: int, length: int, entries: list[tuple[int, int, int]]) -> None:
        state = self.rows[row]
        short = max(-(-length // self.geometry.page_size) - len(state.pages), 0)
        if short:
            taken = self.chain.take(tuple(short * (info.kind != "state") for info in self.bands))
            self._ops.append(taken.op)
            for page in taken.ids[self.owner].tolist():
                entries.append((row, len(state.pages), page))
                state.pages.append(page)

    def make(self, work: list[tuple[int, list[int] | None, bool]], processed: int | None = None) -> Step:
        """The next step: rows with their explicit tokens (None: the last sampled one) and whether they sample."""
        self.seq += 1
        entries: list[tuple[int, int, int]] = []
        forward = None
        if work:
            columns: list[tuple[int, int, int, int, int]] = []
            tokens: list[int] = []
            for row, given, sample in work:
                state = self.rows[row]
                count = 1 if given is None else len(given)
                self._retire(row)
                self._grow(row, state.length + count, entries)
                flags = (SAMPLE if sample else 0) | (0 if given is None else EXPLICIT)
                columns.append((row, state.generation, state.length, count, flags))
                state.length += count
                if given is not None:
                    tokens += given
                    state.tokens += given
            table = np.array(columns, dtype=np.int64).T
            new = np.array(entries, dtype=np.int64).reshape(-1, 3).T
            row_ids, generations, starts, counts = (pack_i32(column) for column in table[:4])
            flag_bytes = table[4].astype(np.uint8).tobytes()
            entry, index, page = (pack_i32(column) for column in new)
            slots = pack_i32([self.rows[row].slot for row, _, _ in work]) if self.state >= 0 else b""
            started = [item for item in self._fresh if item.row in {row for row, _, _ in work}]
            self._fresh = [item for item in self._fresh if item not in started]
            forward = Forward(
                row_ids, generations, starts, counts, flag_bytes, pack_i64(tokens), entry, index, page, started, slots
            )
        ops, self._ops = self._ops, []
        through = self.newest_forward if processed is None else processed
        digest = self.chain.step_digest(self.seq, ops)
        step = Step(1, self.seq, 0, through, [], ops, forward, digest)
        if forward is not None:
            self.newest_forward = self.seq
        self.steps.append(step)
        return step

    def take(self, report: Report) -> Report:
        """Note a report's tokens in the rows that are still of its generation."""
        for row, generation, token in zip(
            i32(report.rows).tolist(), i32(report.generations).tolist(), i64(report.tokens).tolist(), strict=True
        ):
            if self.rows[row].generation == generation:
                self.rows[row].tokens.append(token)
        self.reports.append(report)
        return report

    def step(self, work: list[tuple[int, list[int] | None, bool]]) -> Report:
        """Make, apply and finish one step."""
        return self.take(self.worker.finish(self.worker.launch(self.make(work))))

    def generate(self, row: int, prompt: list[int], count: int, chunk: int = 0, **start: object) -> list[int]:
        """`count` tokens after a prompt, alone in the batch, prefilled in chunks; the row is ended."""
        self.start(row, **start)  # type: ignore[arg-type]
        size = chunk or len(prompt)
        for begin in range(0, len(prompt), size):
            part = prompt[begin : begin + size]
            self.step([(row, part, begin + size >= len(prompt))])
        for _ in range(count - 1):
            self.step([(row, None, True)])
        self.end(row)
        return self.rows[row].tokens[len(prompt) :]
