"""Rank settings: what `Hello` tells the ranks of one epoch, out of the settings of the daemon.

Owns the mapping, and where ranks meet. Must never read a file or the machine. Pure: equal settings, run directory and
epoch, equal `RankSettings`.
"""

from __future__ import annotations

from pathlib import Path

from daemon.layers import parse_layers
from daemon.settings_table import Settings
from ipc.messages import RankSettings


def rank_settings(settings: Settings, epoch: int = 1, life: str = "", run_dir: Path | None = None) -> RankSettings:
    """What `Hello` tells a rank of an epoch; without a run directory: what holds for every epoch."""
    return RankSettings(
        model_path=settings.model,
        model_name=settings.served_model_name,
        dtype=settings.dtype,
        page_size=settings.page_size,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        arena_bytes=settings.arena_bytes,
        mem_fraction_ppm=round(settings.mem_fraction * 1_000_000),
        runner=settings.rank_runner,
        threads=settings.threads,
        invariants=settings.invariants,
        options=dict(settings.rank_option),
        checkpoint_interval=settings.checkpoint_interval if keeps_checkpoints(settings) else 0,
        tensor_ranks=settings.tensor_parallel_size,
        stage_layers=stage_layers(settings),
        rendezvous="" if run_dir is None else rendezvous(settings, epoch, life, run_dir),
        collective_timeout_ms=round(settings.collective_timeout_s * 1000),
    )


def stage_layers(settings: Settings) -> list[int]:
    """Layers of each stage, empty for one; zeros: as even as can be, which only ranks, who know the model, can say."""
    layers = parse_layers(settings.pp_layers, settings.pipeline_parallel_size)
    return layers if len(layers) > 1 or any(layers) else []


def rank_ids(settings: Settings) -> tuple[tuple[int, int], ...]:
    """(stage, tensor rank) of every rank, stage by stage: their order in `torch.distributed` too."""
    stages, ranks = range(settings.pipeline_parallel_size), range(settings.tensor_parallel_size)
    return tuple((stage, rank) for stage in stages for rank in ranks)


def rendezvous(settings: Settings, epoch: int, life: str, run_dir: Path) -> str:
    """Where the ranks of an epoch of a daemon's life find each other; empty for one rank.

    `tcp://HOST:PORT/NAME` where rank 0.0 listens; `env:///NAME`: where the launcher that starts the ranks says;
    `file://PATH`. Name and file are another one in each epoch of each life: a launcher's store outlives them.
    """
    if len(rank_ids(settings)) == 1:
        return ""
    name = f"rendezvous-{life[:8]}-{epoch}"
    if settings.rendezvous:
        return f"tcp://{settings.rendezvous}/{name}"
    if settings.rank_launch == "wait":
        return f"env:///{name}"
    return f"file://{run_dir / name}"


def keeps_checkpoints(settings: Settings) -> bool:
    """Whether requests of a model with recurrent state own a checkpoint slot beside their working slot."""
    return settings.enable_prefix_caching and settings.state_cache == "extra_buffer"
