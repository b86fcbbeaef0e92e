"""Ranks of a job: one process without a launcher, sums and shares with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import launch

from mha2gqa import distributed

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
