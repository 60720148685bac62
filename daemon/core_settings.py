"""Core settings: the core's numbers out of the settings of the daemon.

Owns the mapping. Must never read a file or the machine. Pure: equal settings, equal `CoreConfig`, which stands in the
journal's `Opened` record.
"""

from __future__ import annotations

from daemon.core.limits import CoreConfig
from daemon.settings_table import Settings


def core_config(settings: Settings) -> CoreConfig:
    """The core's numbers out of the settings."""
    return CoreConfig(
        page_size=settings.page_size,
        max_running_requests=settings.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
        max_batched_tokens=settings.max_num_batched_tokens,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_model_len=settings.max_model_len,
        schedule_policy=settings.schedule_policy,
        overlap=not settings.disable_overlap,
        reserve=settings.reserve,
        enable_prefix_caching=settings.enable_prefix_caching,
        checkpoint_interval=settings.checkpoint_interval,
        state_cache=settings.state_cache,
        eviction_policy=settings.eviction_policy,
        checkpoint_policy=settings.checkpoint_policy,
        checkpoint_mark_tokens=settings.checkpoint_mark_tokens,
        cache_quota_ppm=ppm(settings.cache_quota),
        cache_quotas={name: ppm(float(share)) for name, share in settings.cache_quotas.items()},
        pinned_max_ppm=ppm(settings.pinned_max),
        priority_preemption=settings.enable_priority_preemption,
        fair_quantum_tokens=settings.fair_quantum_tokens,
        overtaken_max=settings.overtaken_max,
        deadline_check=settings.deadline_check,
        epoch_losses_max=settings.epoch_losses_max,
    )


def ppm(fraction: float) -> int:
    """A fraction in parts per million, which the core reckons in."""
    return round(fraction * 1_000_000)
