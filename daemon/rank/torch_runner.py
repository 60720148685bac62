"""The torch runner: one rank's part of a real model over the arena, on a CPU or one CUDA GPU.

Owns the model, the arena's tensor, the last sampled tokens and the way of hidden states between stages. Must never keep
a physical unit beyond one launch. Invariants: with one stage the last sampled token of every running row is on the
device when the next batch is launched, with several all input tokens come with the step; every rank of a stage
launches the same forwards in the same order, so collectives and transfers need no names; tensor rank 0 of the last
stage samples and its peers are told. Everything here runs in the work thread.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.decl import Layer
from allocator.geometry import Geometry, StageGeometry
from daemon.layers import LayersError, split_layers
from daemon.rank.backend import open_backend
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.declare import check_declared, check_tensor_ranks, declare
from daemon.rank.device import Device
from daemon.rank.dtypes import choose_dtype, cpu_flags
from daemon.rank.errors import BadOption, StepRefused
from daemon.rank.facts import ModelFiles, read_files
from daemon.rank.group import Group
from daemon.rank.layout import SOLO, Layout
from daemon.rank.model import Model
from daemon.rank.model_choice import load_model
from daemon.rank.paged_attention import PagedAttention, layer_views
from daemon.rank.process_group import open_group
from daemon.rank.runner import Launched, Prepared
from daemon.rank.sampler import Sampler
from daemon.rank.sizes import Sized, budget_bytes, plan_and_size
from daemon.rank.states import RecurrentStates, state_views
from daemon.rank.threads import choose_threads, share_cores
from daemon.rank.wanted import LogprobReports, Wanted, wanted_positions
from daemon.rank.warm_up import warm_up
from ipc.messages import RankSettings
from kernels.upload import upload

OPTIONS = {"model_impl": "auto", "device": "auto", "host_kernels": "auto"}


Join = Callable[[RankSettings, Layout, int, torch.device], Group]


class TorchRunner:
    """Loads its part of a directory, sizes the arena from the layers' real shapes, and runs ragged batches."""

    device: Device

    def __init__(self, settings: RankSettings, layout: Layout = SOLO, epoch: int = 1, join: Join = open_group) -> None:
        unknown = sorted(set(settings.options) - set(OPTIONS))
        if unknown:
            raise BadOption(f"unknown option {unknown[0]!r} of the torch runner; it has {', '.join(OPTIONS)}")
        self._settings = settings
        self._layout = layout
        self._epoch = epoch
        self._join = join
        self._group: Group
        self._model: Model
        self._files: ModelFiles
        self._sized: Sized
        self._attention: PagedAttention
        self._states: RecurrentStates
        self._sampler: Sampler
        self._logprobs = LogprobReports()
        self._backend = open_backend(self._option("device"), layout)
        self._last = torch.zeros(settings.max_running_requests, dtype=torch.int64, device=self._backend.torch_device)

    def prepare(self) -> Prepared:
        """Join the other ranks, load this rank's part, choose dtype and threads, size the arena, warm up."""
        settings, layout = self._settings, self._layout
        self._files = read_files(Path(settings.model_path), settings.model_name, settings.max_model_len)
        config, device = self._files.config, self._backend.torch_device
        check_tensor_ranks(config, layout.ranks)
        local = self._local_layers(int(config.num_hidden_layers))
        dtype, why = choose_dtype(settings.dtype, self._files.dtype, device.type, cpu_flags())
        self._backend.choose_kernels(self._option("host_kernels"), dtype)
        self._group = self._join(settings, layout, self._epoch, device)
        self._model, chosen = load_model(
            self._files, dtype, device, self._option("model_impl"), self._backend.library, self._group, local
        )
        threads = self._choose_threads()
        facts = self._files.facts(str(dtype).removeprefix("torch."))
        layers = declare(config, facts.dtype, settings.checkpoint_interval, layout.ranks, self._model.attending)
        here = [layer if index in local else Layer(()) for index, layer in enumerate(layers)]
        check_declared(here, self._model.layers)
        self._group.meet("all weights are loaded, so free memory is what arenas can have")
        budget = budget_bytes(settings, self._backend.free_bytes() // self._backend.sharing(layout))
        self._sized = plan_and_size(layers, settings, facts.max_model_len, budget, local)
        sizing = self._sized.sizing
        tokens_max = min(facts.max_model_len, settings.max_batched_tokens)
        warm_up(self._open_arena, self.launch, sizing.geometry, settings.page_size, tokens_max, layout.stages > 1)
        self._last.zero_()
        versions = {
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
            "device": str(device),
            "dtype": f"{facts.dtype}: {why}",
            "model": chosen,
            "kernels": self._backend.kernels,
            "threads": threads,
        }
        if layout.stages > 1:
            versions["layers"] = f"{local.start}-{local.stop - 1} of {len(layers)}"
        if layout.ranks > 1:
            versions["shard"] = f"{layout.rank + 1} of {layout.ranks}: {self._model.split}"
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def _local_layers(self, count: int) -> range:
        try:
            return split_layers(count, self._settings.stage_layers or [0])[self._layout.stage]
        except LayersError as error:
            raise BadOption(str(error)) from None

    def _choose_threads(self) -> str:
        """Set torch's threads, in words: measured for a rank alone, else this rank's share of the machine's cores."""
        fixed = self._settings.threads or share_cores(self._layout)
        threads, measured = choose_threads(fixed, self._model.layer_work)
        return " ".join([str(threads), *(f"({n}: {ms:.1f} ms)" for n, ms in measured.items())])

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

    def expect(self, tokens: int) -> None:
        """Let the input of a forward that will be launched arrive."""
        if not self._layout.first:
            self._group.expect_previous((tokens, self._model.hidden_size), self._model.hidden_dtype)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """One ragged forward through this stage; the last one samples, and the tokens become the rows' last ones."""
        check_tokens(batch, self._files.vocab_size)
        with self._backend.forward_scope():
            wanted = wanted_positions(batch)
            self._attention.begin(batch)
            self._states.begin(batch)
            positions, indexes = self._put(batch.positions), self._put(wanted.indexes)
            out = self._model.forward(self._input(batch), positions, indexes, self._attention, self._states)
            if not self._layout.last:
                self._group.send_next(out)
                return self._backend.launched(self._put(np.zeros(0, dtype=np.int64)), [])
            speaks = self._layout.rank == 0
            reports = self._logprobs.of_prompts(batch, wanted, out) if speaks else []
            tokens = self._sample(batch, wanted, out) if speaks else self._put(batch.rows[batch.sampled])
            tokens = self._tell(batch, tokens)
            reports += self._logprobs.of_outputs(batch, wanted, out, tokens) if speaks else []
            return self._backend.launched(tokens, reports)

    def _input(self, batch: Batch) -> Tensor:
        """Input ids int64[T] on the first stage, what the stage before made of them on the others."""
        if self._layout.first:
            return self._tokens(batch)
        shape = (batch.tokens.size, self._model.hidden_size)
        return self._group.receive_previous(shape, self._model.hidden_dtype)

    def _tell(self, batch: Batch, tokens: Tensor) -> Tensor:
        """The sampled tokens int64[k], as rank 0 has them, on every tensor rank; kept as their rows' last ones."""
        if tokens.numel():
            tokens = self._group.broadcast(tokens)
            self._last[self._put(batch.rows[batch.sampled])] = tokens
        return tokens

    def _put(self, column: NDArray[np.integer]) -> Tensor:
        """An int64 column on the device; the host does not wait for what the stream holds."""
        return upload(torch.from_numpy(column.astype(np.int64, copy=False)), self._backend.torch_device)

    def _tokens(self, batch: Batch) -> Tensor:
        """Input ids int64[T], with the last sampled tokens of carried rows filled in."""
        tokens = self._put(batch.tokens)
        if batch.carried.size and not self._layout.last:
            row = batch.rows[batch.carried[0]]
            raise StepRefused(f"row {row} goes on from its last sampled token, which is on the last stage only")
        if batch.carried.size:
            rows = self._put(batch.rows[batch.carried])
            tokens[self._put(batch.offsets[batch.carried])] = self._last[rows]
        return tokens

    def _sample(self, batch: Batch, wanted: Wanted, logits: Tensor) -> Tensor:
        """Tokens int64[k] of the sampling rows."""
        sampling = batch.sampled
        rows = batch.rows[sampling]
        if sampling.size == 0:
            return self._put(rows)
        ends = batch.starts[sampling].astype(np.int64) + batch.counts[sampling]
        chosen = logits if wanted.indexes.size == sampling.size else logits[self._put(wanted.sampled)]
        return self._sampler.sample(chosen, rows, batch.generations[sampling], ends, batch.sampling)
