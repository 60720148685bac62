"""The torch runner: a real model over the arena, on a CPU or one CUDA GPU.

Owns the model, the arena's tensor and the last sampled tokens. Must never keep a physical unit beyond one launch.
Invariants: the last sampled token of every running row is on the device when the next batch is launched; everything
here runs in the work thread.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allocator.geometry import Geometry
from daemon.rank.arena import ArenaBytes, HostArena
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.device import Device, ImmediateDevice
from daemon.rank.dtypes import choose_dtype, cpu_flags
from daemon.rank.errors import BadOption
from daemon.rank.facts import ModelFiles, read_files
from daemon.rank.model import Model
from daemon.rank.model_choice import load_model
from daemon.rank.paged_attention import HostAttention, PagedAttention, layer_views
from daemon.rank.runner import Outcome, Prepared
from daemon.rank.sampler import Sampler
from daemon.rank.sizes import Sized, available_bytes, budget_bytes, plan_and_size
from daemon.rank.threads import choose_threads
from daemon.rank.wanted import LogprobReports, wanted_positions
from ipc.messages import RankSettings

OPTIONS = {"model_impl": "auto"}


class HostLaunched(NamedTuple):
    """A forward on the CPU: done when the launch returned."""

    result: Outcome

    def due_in_s(self) -> float:
        """Nothing to wait for."""
        return 0

    def outcome(self) -> Outcome:
        """The sampled tokens."""
        return self.result


class TorchRunner:
    """Loads a directory, sizes the arena from the layers' real shapes, and runs ragged batches."""

    device: Device
    arena: ArenaBytes

    def __init__(self, settings: RankSettings, stage: int, rank: int) -> None:
        if (stage, rank) != (0, 0):
            raise BadOption(
                f"stage {stage} rank {rank}: a model runs on one rank; pipeline and tensor ranks are not built"
            )
        unknown = sorted(set(settings.options) - set(OPTIONS))
        if unknown:
            raise BadOption(f"unknown option {unknown[0]!r} of the torch runner; it has {', '.join(OPTIONS)}")
        self._settings = settings
        self._model: Model
        self._files: ModelFiles
        self._sized: Sized
        self._attention: PagedAttention
        self._sampler: Sampler
        self._logprobs = LogprobReports()
        self._last = torch.full((settings.max_running_requests,), -1, dtype=torch.int64)

    def prepare(self) -> Prepared:
        """Load the weights, choose dtype and threads, size the arena."""
        settings = self._settings
        self._files = read_files(Path(settings.model_path), settings.model_name, settings.max_model_len)
        dtype, why = choose_dtype(settings.dtype, self._files.dtype, "cpu", cpu_flags())
        implementation = settings.options.get("model_impl", OPTIONS["model_impl"])
        self._model, chosen = load_model(self._files, dtype, implementation)
        threads, measured = choose_threads(settings.threads, self._model.layer_work)
        facts = self._files.facts(str(dtype).removeprefix("torch."))
        budget = budget_bytes(settings, available_bytes())
        self._sized = plan_and_size(self._model.shapes, settings, facts.max_model_len, budget)
        sizing = self._sized.sizing
        versions = {
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
            "device": "cpu",
            "dtype": f"{facts.dtype}: {why}",
            "model": chosen,
            "threads": " ".join([str(threads), *(f"({n}: {ms:.1f} ms)" for n, ms in measured.items())]),
        }
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Allocate the arena and its typed views."""
        mine = geometry.stages[stage]
        data = torch.zeros(mine.arena_bytes, dtype=torch.uint8)
        self.device = ImmediateDevice()
        self.arena = HostArena(mine, data.numpy())
        model = self._model
        self._attention = HostAttention(layer_views(data, self._sized.plan, len(model.shapes), model.dtype))
        self._sampler = Sampler(self._files.vocab_size, data.device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> HostLaunched:
        """One ragged forward, then sampling; the sampled tokens become the rows' last ones."""
        tokens = self._tokens(batch)
        wanted = wanted_positions(batch)
        self._attention.begin(batch)
        indexes = torch.from_numpy(wanted.indexes)
        logits = self._model.forward(tokens, torch.from_numpy(batch.positions), indexes, self._attention)
        reports = self._logprobs.of_prompts(batch, wanted, logits)
        if batch.sampled.size == 0:
            return HostLaunched(Outcome(batch.tokens[:0], reports))
        sampling = batch.sampled
        ends = batch.starts[sampling].astype(np.int64) + batch.counts[sampling]
        rows = batch.rows[sampling]
        chosen = logits if wanted.indexes.size == sampling.size else logits[torch.from_numpy(wanted.sampled)]
        sampled = self._sampler.sample(chosen, rows, batch.generations[sampling], ends, batch.sampling)
        reports += self._logprobs.of_outputs(batch, wanted, logits, sampled)
        self._last[torch.from_numpy(rows.astype(np.int64))] = sampled
        return HostLaunched(Outcome(sampled.numpy(), reports))

    def _tokens(self, batch: Batch) -> Tensor:
        """Input ids int64[T], with the last sampled tokens of carried rows filled in."""
        self._last[torch.from_numpy(batch.fresh.astype(np.int64))] = -1
        tokens = torch.from_numpy(batch.tokens)
        if batch.carried.size:
            rows = torch.from_numpy(batch.rows[batch.carried].astype(np.int64))
            tokens[torch.from_numpy(batch.offsets[batch.carried])] = self._last[rows]
        check_tokens(batch, batch.tokens, self._files.vocab_size)
        return tokens
