"""Ranks of a job: one process without a launcher, sums and shares with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import launch

from mha2gqa import distributed
from mha2gqa.reconstruct.ranks import Ranks

WORKER = """
import torch
from mha2gqa import distributed
assert not distributed.is_initialized()
distributed.initialize()
distributed.initialize()  # once is enough
total = distributed.all_reduce_(torch.tensor([1.0 + distributed.rank(), 10.0]))
distributed.barrier()
assert total.tolist() == [3.0, 20.0], total
assert distributed.is_rank_zero() == (distributed.rank() == 0)
print(list(distributed.split(5)))
distributed.destroy()
assert not distributed.is_initialized()
"""


def test_one_process_is_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (distributed.rank(), distributed.world_size(), distributed.is_launched()) == (0, 1, False)
    distributed.initialize()
    distributed.barrier()
    distributed.destroy()
    tensor = torch.tensor([2.0])
    assert distributed.all_reduce_(tensor) is tensor
    assert tensor.tolist() == [2.0]
    assert distributed.split(7) == range(7)


@pytest.mark.parametrize(("count", "processes"), [(7, 3), (2, 4), (0, 2), (8, 4)])
def test_shares_cover_all_items_once(count: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    shares = []
    for number in range(processes):
        monkeypatch.setenv("RANK", str(number))
        shares.append(distributed.split(count))
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_two_processes_sum(tmp_path: Path) -> None:
    outputs = launch(["-c", WORKER], tmp_path)
    assert [output.strip().splitlines()[-1] for output in outputs] == ["[0, 1]", "[2, 3, 4]"]


class _OtherRankReached(Ranks):
    """The first of two ranks, where the other one has a gradient of what is named."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([0, 1, 0], dtype=x.dtype)


def test_experts_that_no_rank_reached_keep_no_gradient() -> None:
    mine, theirs, nobodys = rest = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    with _OtherRankReached(0, 2).mean_gradients([], rest) as mean:
        mine.grad = torch.full((2, 2), 4.0)
        mean()
    assert mine.grad is not None and torch.equal(mine.grad, torch.full((2, 2), 2.0))
    assert theirs.grad is not None and not theirs.grad.any()
    assert nobodys.grad is None
