"""Threads as ranks: collectives agree bit for bit, and a rank that is gone is an error on all others."""

import pytest
import torch

from daemon.rank.errors import GroupBroken
from tools.thread_group import ThreadGroup, run_ranks, thread_groups


def test_collectives_give_every_rank_the_same_bits() -> None:
    """Sum, gather and broadcast of three ranks are those of plain torch, and equal on all of them."""
    torch.manual_seed(0)
    parts = [torch.randn(5, 7) for _ in range(3)]

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        own = parts[group.layout.rank]
        return [group.all_reduce(own.clone()), group.all_gather(own, 1), group.broadcast(own)]

    for summed, gathered, sent in run_ranks(thread_groups(ranks=3), work):
        assert torch.equal(summed, parts[0] + parts[1] + parts[2])
        assert torch.equal(gathered, torch.cat(parts, 1))
        assert torch.equal(sent, parts[0])


def test_stages_pass_tensors_in_order_to_the_same_tensor_rank() -> None:
    """Two tensors a rank go through three stages, each adding one; nobody gets another rank's."""

    def work(group: ThreadGroup) -> list[float]:
        seen = []
        for turn in range(2):
            start = torch.full((2,), 10.0 * group.layout.rank + 100 * turn)
            x = start if group.layout.first else group.receive_previous((2,), torch.float32)
            seen.append(float(x[0]))
            if not group.layout.last:
                group.send_next(x + 1)
        return seen

    assert run_ranks(thread_groups(3, 2), work) == [
        [0.0, 100.0], [10.0, 110.0], [1.0, 101.0], [11.0, 111.0], [2.0, 102.0], [12.0, 112.0]
    ]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_raises_breaks_the_others(stages: int) -> None:
    """What a rank raised comes out, and its peers end with GroupBroken although the timeout is far away."""
    broken = []

    def work(group: ThreadGroup) -> None:
        if group.layout.first and group.layout.rank == 0:
            raise ValueError("mine")
        try:
            if group.layout.first:
                group.all_reduce(torch.ones(1))
            else:
                group.receive_previous((1,), torch.float32)
        except GroupBroken as error:
            broken.append(str(error))
            raise

    with pytest.raises(ValueError, match="mine"):
        run_ranks(thread_groups(stages, 2, timeout_s=600), work)
    assert len(broken) == 2 * stages - 1
    assert all("rank 0.0" in text for text in broken)


def test_a_late_peer_is_an_error_within_the_timeout() -> None:
    """A rank that never comes is named as late."""
    groups = thread_groups(ranks=2, timeout_s=0.05)
    with pytest.raises(GroupBroken, match=r"rank 0\.0: all_gather: a peer did not take part within 0\.05 s"):
        groups[0].all_gather(torch.ones(1), 0)
