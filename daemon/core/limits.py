"""The core's configuration: every number a decision may read, fixed for one life and recorded in `Opened`.

Owns the plain values only; flags, defaults, help and validation live in `daemon.config`. Must never hold a path, an
address or anything of the machine.
"""

from __future__ import annotations

import msgspec

CHECKPOINT_POLICIES = ("likely", "grid")  # the first is the default


class CoreConfig(msgspec.Struct, frozen=True):
    """Limits and policies of the scheduler core. Names follow the flags of `bandmaster serve`."""

    page_size: int = 16
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    max_batched_tokens: int = 2048  # token budget of one step, decode and prefill together
    chunked_prefill_size: int = 512  # most prompt tokens of one request in one step
    max_model_len: int = 0  # 0: the model's own
    schedule_policy: str = "priority"  # or fcfs (which refuses a priority), lpm, deadline, fair
    overlap: bool = True  # launch step N+1 before step N is processed
    reserve: str = "estimate"  # or "full": admit only what fits with every running request at its longest
    retracts_max: int = 8  # a request retracted this often is not chosen again
    stall_steps: int = 64  # ticks without a scheduled token, with work waiting, before a livelock is reported
    n_max: int = 128
    stop_ids_max: int = 128
    logprobs_max: int = 20
    flush_moves_max: int = 32
    enable_prefix_caching: bool = True
    checkpoint_interval: int = 256  # tokens between checkpoints of recurrent state; a multiple of `page_size`
    state_cache: str = "extra_buffer"  # or "no_buffer": state is cached at a sequence's end only, `page_size` 1
    eviction_policy: str = "value"  # or lru, lfu, fifo, priority: what of the prefix cache goes first
    checkpoint_policy: str = "likely"  # or "grid": every grid point that a prompt reaches is given to the cache
    checkpoint_mark_tokens: int = 4096  # a prompt seen first gives a checkpoint about every so many tokens; 0: none
    cache_quota_ppm: int = 1_000_000  # most of the arena that cached units of one namespace may take
    cache_quotas: dict[str, int] = {}  # the same by name of the namespace, in parts per million
    pinned_max_ppm: int = 250_000  # most of the arena that pinned prefixes may take together
    priority_preemption: bool = False  # a waiting request may retract running ones of lower priority
    fair_quantum_tokens: int = 4096  # what a namespace may take in its turn under the policy "fair"
    overtaken_max: int = 4096  # a waiting request is overtaken by at most so many later ones, whatever the policy
    deadline_check: bool = True  # refuse a request at once, end a waiting one, whose deadline cannot be met
    epoch_losses_max: int = 3  # epochs that die under a request, the last one while it runs alone, end it; 0: never


def state_cache_problem(config: CoreConfig) -> str:
    """Why states of a model with recurrent layers cannot be cached as configured, or nothing."""
    if not config.enable_prefix_caching:
        return ""
    if config.checkpoint_policy not in CHECKPOINT_POLICIES:
        return f"checkpoint_policy {config.checkpoint_policy!r} is none of {', '.join(CHECKPOINT_POLICIES)}"
    interval, page_size = config.checkpoint_interval, config.page_size
    if config.state_cache == "no_buffer":
        if page_size == 1:
            return ""
        return f"state_cache no_buffer needs page_size 1, not {page_size}: a sequence may end anywhere in a page"
    if config.state_cache != "extra_buffer":
        return f"state_cache {config.state_cache!r} is none of extra_buffer, no_buffer"
    if interval < 1 or interval % page_size:
        return f"checkpoint_interval {interval} is no multiple of page_size {page_size}: checkpoints end whole pages"
    return ""
