"""The grouping search against exhaustive enumeration, and grouping files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import search_worker
import torch
from launching import launch

from mha2gqa.architectures import AttentionSpec
from mha2gqa.conversion import workers
from mha2gqa.errors import UsageError
from mha2gqa.heads import AttentionWeights
from mha2gqa.merging import MergeContext
from mha2gqa.merging.grouping import canonical, evaluations, read_groupings, search
from mha2gqa.merging.module_objective import merge_objective
from mha2gqa.reconstruct.ranks import Ranks


def partitions(left: tuple[int, ...], size: int):
    """Every partition into groups of `size`."""
    if not left:
        yield ()
        return
    first, rest = left[0], left[1:]
    from itertools import combinations

    for others in combinations(rest, size - 1):
        remaining = tuple(h for h in rest if h not in others)
        for tail in partitions(remaining, size):
            yield ((first, *others), *tail)


def objective(heads: int, seed: int, d: int = 4):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    w = AttentionWeights(draw(heads, d, 16), draw(heads, d, 16), draw(heads, d, 16), draw(heads, 16, d))
    return merge_objective(w, MergeContext(AttentionSpec(), d))


def each(cost: Callable[[tuple[int, ...]], float]) -> Callable[[Sequence[tuple[int, ...]]], list[float]]:
    return lambda groups: [cost(group) for group in groups]


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (9, 3), (10, 2)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_search_finds_the_best_partition_of_few_heads(heads: int, groups: int, seed: int) -> None:
    p = objective(heads, seed)
    totals = {part: sum(p.cost(g) for g in part) for part in partitions(tuple(range(heads)), heads // groups)}
    found = search(p.pairs().numpy(), each(p.cost), groups)
    assert totals[found] <= 1.01 * min(totals.values())
    assert totals[found] < np.mean(list(totals.values()))


def test_hidden_copies_are_found_whatever_the_budget() -> None:
    hidden = ((0, 5, 9), (1, 4, 11), (2, 7, 10), (3, 6, 8))
    gen = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, 20, generator=gen)
    k = torch.zeros(12, 6, 20)
    for g, group in enumerate(hidden):
        k[list(group)] = base[g]
    w = AttentionWeights(
        torch.randn(12, 6, 20, generator=gen), k, k.clone(), torch.randn(12, 20, 6, generator=gen)
    )
    p = merge_objective(w, MergeContext(AttentionSpec(), 6))
    for budget in (0, 5, 1000):
        assert search(p.pairs().numpy(), each(p.cost), 4, budget=budget) == hidden


def test_search_never_loses_to_the_neighbours_and_is_deterministic() -> None:
    for seed in range(4):
        p = objective(12, seed)
        pairs = p.pairs().numpy()
        found = search(pairs, each(p.cost), 3)
        assert found == search(pairs.copy(), each(p.cost), 3)
        assert p.relative_error(found) <= p.relative_error(((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)))
        assert sorted(h for g in found for h in g) == list(range(12))


def test_the_budget_holds() -> None:
    p, calls = objective(16, 0), []
    search(p.pairs().numpy(), each(lambda g: calls.append(g) or p.cost(g)), 4, budget=60)
    assert len(calls) <= 60 + 2 * 4
    assert len(calls) == len(set(calls))
    assert evaluations(128) == 2000 and 150 < evaluations(512) < 400 and evaluations(4096) == 24


def test_trivial_partitions_cost_nothing() -> None:
    def never(groups: Sequence[tuple[int, ...]]) -> list[float]:
        raise AssertionError(groups)

    assert search(np.ones((4, 4)), never, 1) == ((0, 1, 2, 3),)
    assert search(np.ones((4, 4)), never, 4) == ((0,), (1,), (2,), (3,))
    assert canonical([[3, 1], [2, 0]]) == ((0, 2), (1, 3))


SITES = {"model.layers.0.self_attn": (4, 2), "model.layers.1.self_attn": (4, 2)}


@pytest.mark.parametrize(
    "content",
    [
        [[0, 2], [3, 1]],
        {"0": [[0, 2], [3, 1]], "1": [[0, 2], [3, 1]]},
        {"grouping": {path: [[0, 2], [3, 1]] for path in SITES}, "method": "joint"},
    ],
)
def test_groupings_are_read_as_written(content: object, tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_text(json.dumps(content))
    assert read_groupings(file, SITES) == dict.fromkeys(SITES, ((0, 2), (3, 1)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "JSON"),
        ('{"0": [[0, 2], [3, 1]]}', "no entry for model.layers.1"),
        ("[[0, 1, 2], [3]]", "2 groups of 2"),
        ("[[0, 1], [1, 2]]", "each head once"),
        ('[["a", 1], [2, 3]]', "whole numbers"),
        ("[[true, 0], [2, 3]]", "whole numbers"),
        ("3", "list of lists"),
    ],
)
def test_bad_grouping_files_are_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=says):
        read_groupings(file, SITES)
    with pytest.raises(UsageError, match="--grouping"):
        read_groupings(tmp_path / "missing.json", SITES)


@pytest.mark.parametrize("budget", [24, 200])
def test_costs_computed_ahead_change_nothing(budget: int) -> None:
    """Not the partition, and not how much of the budget is used: only costs that are asked for count against it."""
    rng = np.random.default_rng(budget)
    points = rng.normal(size=(16, 6))
    pairs = ((points[:, None] - points[None]) ** 2).sum(-1)

    def cost(group: tuple[int, ...]) -> float:
        return float(pairs[np.ix_(group, group)].sum()) ** 1.3 + float(weights[list(group)].sum())

    weights = rng.uniform(0, 20, size=16)
    asked: list[tuple[int, ...]] = []

    def costs(groups: Sequence[tuple[int, ...]]) -> list[float]:
        asked.extend(groups)
        sizes.append(len(groups))
        return each(cost)(groups)

    sizes: list[int] = []
    alone, one_by_one = search(pairs, costs, 4, budget=budget), len(asked)
    assert set(sizes) == {1}
    for at_once in (3, 32):
        asked.clear()
        sizes.clear()
        assert search(pairs, costs, 4, budget=budget, at_once=at_once) == alone
        assert len(asked) == len(set(asked)) and max(sizes) <= at_once
        assert len(sizes) < one_by_one / 2


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_search_together_find_what_one_finds(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal groups, and to the last bit equal costs, in every process and however the work is shared."""
    worker = str(Path(__file__).with_name("search_worker.py"))
    monkeypatch.setattr(workers, "_threads", workers._threads)  # which the search below sets
    one = json.loads(json.dumps(search_worker.everything()))
    many = [json.loads(said.splitlines()[-1]) for said in launch([worker], tmp_path, processes)]
    assert many == [one] * processes
    groupings, _ = one[0]
    assert (
        len({json.dumps(grouping) for grouping in groupings.values()}) == 2
    )  # of one module other than neighbours


@pytest.mark.parametrize(
    ("own", "others", "threads"),
    [
        (
            1,
            [("here", {0, 1, 2, 3})],
            4,
        ),  # a launcher has set one thread: half of eight cores that both may use
        (1, [("here", {8, 9})], 8),  # bound to cores of their own
        (1, [("there", {0, 1, 2, 3})] * 7, 8),  # on another machine
        (1, [("here", set(range(8)))] * 15, 1),
        (3, [("here", set(range(8)))], 3),  # as the user has set them
    ],
)
def test_each_process_searches_on_its_part_of_the_cores(
    own: int, others: list[tuple[str, set[int]]], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Several(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, *others]

    monkeypatch.setattr(workers.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 8)
    assert workers._threads(own, Several(0, 1 + len(others))) == threads
    assert workers._threads(own, Ranks()) == own


@pytest.mark.parametrize("opened", [workers.workers, workers.own_workers])
def test_a_search_leaves_torch_as_many_threads_as_there_were(opened: Any) -> None:
    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with opened(Ranks()) as team:
            assert team.each(lambda _: torch.get_num_threads(), range(2)) == [1, 1]
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(own)
