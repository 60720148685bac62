"""The torch runner: a real model over the arena, on a CPU or one CUDA GPU.

Owns the model, the arena's tensor and the last sampled tokens. Must never keep a physical unit beyond one launch.
Invariants: the last sampled token of every running row is on the device when the next batch is launched; everything
here runs in the work thread.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.geometry import Geometry, StageGeometry
from daemon.rank.backend import open_backend
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.declare import check_declared, declare
from daemon.rank.device import Device
from daemon.rank.dtypes import choose_dtype, cpu_flags
from daemon.rank.errors import BadOption
from daemon.rank.facts import ModelFiles, read_files
from daemon.rank.model import Model
from daemon.rank.model_choice import load_model
from daemon.rank.paged_attention import PagedAttention, layer_views
from daemon.rank.runner import Launched, Prepared
from daemon.rank.sampler import Sampler
from daemon.rank.sizes import Sized, budget_bytes, plan_and_size
from daemon.rank.states import RecurrentStates, state_views
from daemon.rank.threads import choose_threads
from daemon.rank.wanted import LogprobReports, Wanted, wanted_positions
from daemon.rank.warm_up import warm_up
from ipc.messages import RankSettings
from kernels.upload import upload

OPTIONS = {"model_impl": "auto", "device": "auto", "host_kernels": "auto"}


class TorchRunner:
    """Loads a directory, sizes the arena from the layers' real shapes, and runs ragged batches."""

    device: Device

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
        self._states: RecurrentStates
        self._sampler: Sampler
        self._logprobs = LogprobReports()
        self._backend = open_backend(self._option("device"))
        self._last = torch.zeros(settings.max_running_requests, dtype=torch.int64, device=self._backend.torch_device)

    def prepare(self) -> Prepared:
        """Load the weights, choose dtype and threads, size the arena, warm up."""
        settings = self._settings
        self._files = read_files(Path(settings.model_path), settings.model_name, settings.max_model_len)
        device = self._backend.torch_device
        dtype, why = choose_dtype(settings.dtype, self._files.dtype, device.type, cpu_flags())
        self._backend.choose_kernels(self._option("host_kernels"), dtype)
        self._model, chosen = load_model(self._files, dtype, device, self._option("model_impl"), self._backend.library)
        threads, measured = choose_threads(settings.threads, self._model.layer_work)
        facts = self._files.facts(str(dtype).removeprefix("torch."))
        budget = budget_bytes(settings, self._backend.free_bytes())
        layers = declare(self._files.config, str(dtype).removeprefix("torch."), settings.checkpoint_interval)
        check_declared(layers, self._model.layers)
        self._sized = plan_and_size(layers, settings, facts.max_model_len, budget)
        sizing = self._sized.sizing
        tokens_max = min(facts.max_model_len, settings.max_batched_tokens)
        warm_up(self._open_arena, self.launch, sizing.geometry, settings.page_size, tokens_max)
        self._last.zero_()
        versions = {
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
            "device": str(device),
            "dtype": f"{facts.dtype}: {why}",
            "model": chosen,
            "kernels": self._backend.kernels,
            "threads": " ".join([str(threads), *(f"({n}: {ms:.1f} ms)" for n, ms in measured.items())]),
        }
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def _option(self, name: str) -> str:
        return self._settings.options.get(name, OPTIONS[name])

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device with an arena of the agreed geometry, and its typed views."""
        self._open_arena(geometry.stages[stage])

    def _open_arena(self, stage: StageGeometry) -> Device:
        backend, model = self._backend, self._model
        self.device, data = backend.open_device(stage)
        views = layer_views(data, self._sized.plan, model.dtype)
        self._attention = backend.attention(views)
        self._states = backend.states(state_views(data, self._sized.plan))
        self._sampler = Sampler(self._files.vocab_size, backend.torch_device, backend.draw)
        return self.device

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """One ragged forward, then sampling; the sampled tokens become the rows' last ones."""
        check_tokens(batch, self._files.vocab_size)
        with self._backend.forward_scope():
            wanted = wanted_positions(batch)
            self._attention.begin(batch)
            self._states.begin(batch)
            positions, indexes = self._put(batch.positions), self._put(wanted.indexes)
            logits = self._model.forward(self._tokens(batch), positions, indexes, self._attention, self._states)
            reports = self._logprobs.of_prompts(batch, wanted, logits)
            tokens = self._sample(batch, wanted, logits)
            reports += self._logprobs.of_outputs(batch, wanted, logits, tokens)
            return self._backend.launched(tokens, reports)

    def _put(self, column: NDArray[np.integer]) -> Tensor:
        """An int64 column on the device; the host does not wait for what the stream holds."""
        return upload(torch.from_numpy(column.astype(np.int64, copy=False)), self._backend.torch_device)

    def _tokens(self, batch: Batch) -> Tensor:
        """Input ids int64[T], with the last sampled tokens of carried rows filled in."""
        tokens = self._put(batch.tokens)
        if batch.carried.size:
            rows = self._put(batch.rows[batch.carried])
            tokens[self._put(batch.offsets[batch.carried])] = self._last[rows]
        return tokens

    def _sample(self, batch: Batch, wanted: Wanted, logits: Tensor) -> Tensor:
        """Tokens int64[k] of the sampling rows; kept as their last ones."""
        sampling = batch.sampled
        rows = batch.rows[sampling]
        if sampling.size == 0:
            return self._put(rows)
        ends = batch.starts[sampling].astype(np.int64) + batch.counts[sampling]
        chosen = logits if wanted.indexes.size == sampling.size else logits[self._put(wanted.sampled)]
        sampled = self._sampler.sample(chosen, rows, batch.generations[sampling], ends, batch.sampling)
        self._last[self._put(rows)] = sampled
        return sampled
