"""Which heads share: an equal-size partition of least cost, and partitions kept in files.

An exact group cost is an eigenproblem, so the search walks on the sum of pair costs, which needs none, and
lets exact costs only rank what it found and refine the best within a budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..heads import neighbours

Members = tuple[int, ...]
Grouping = tuple[Members, ...]
Costs = Callable[[Sequence[Members]], Sequence[float]]  # of some groups, each given as ascending head indices
STARTS = 16  # random starts beside the neighbours and the greedy one
FINALISTS = 6
FRESH = 3


def canonical(groups: Sequence[Sequence[int]]) -> Grouping:
    """Heads ascending inside each group, groups by their first head."""
    return tuple(sorted(tuple(sorted(int(h) for h in group)) for group in groups))


def evaluations(size: int) -> int:
    """How many exact group costs a search may ask for, when one is an eigenproblem of this size.

    Seconds per layer at any size: every swap at 256 and below, some hundred at 512, two dozen at 1024.
    """
    return int(min(2000, max(24, 2.7e10 / max(size, 1) ** 3)))


def search(
    pairs: np.ndarray,
    costs: Costs,
    groups: int,
    *,
    budget: int = 1000,
    seed: int = 0,
    at_once: int = 1,
) -> Grouping:
    """The cheapest partition found into `groups` groups of equal size.

    Args:
        pairs: `[K, K]` symmetric cost of two heads sharing.
        costs: Exact costs of some groups.
        groups: G; must divide K.
        budget: Exact costs that may be asked for.
        seed: Of the random starts.
        at_once: How many costs are computed together: beside the one that is asked for those that may be asked for
            next. The result is the same for any number.

    Returns:
        The partition, canonical: the same for the same costs, budget and seed.

    Example:
        >>> far = np.array([[0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]], dtype=float)
        >>> search(far, lambda groups: [far[np.ix_(group, group)].sum() for group in groups], 2)
        ((0, 2), (1, 3))
    """
    heads = len(pairs)
    start = neighbours(heads, groups)
    if groups in (1, heads):
        return start
    memo = _Memo(costs, budget, at_once)
    starts = list(_starts(pairs, groups, seed))
    found = {canonical(_descend(pairs, labels)) for labels in starts}
    ranked = sorted(found, key=lambda partition: (_proxy(pairs, partition), partition))
    if heads == 2 * groups:  # pair costs are the exact costs
        return ranked[0]
    finalists = dict.fromkeys([start, *ranked[: max(1, min(FINALISTS, budget // (2 * groups)))]])
    memo.coming = lambda: (group for partition in finalists for group in partition)
    order = sorted(finalists, key=lambda partition: (memo.total(partition), partition))
    fresh = [canonical(_groups(labels)) for labels in starts[-FRESH:]]  # other basins than the proxy's
    refined = [_refine(pairs, memo, partition) for partition in [*order, *fresh] if memo.left > 0]
    return min([*order, *refined], key=lambda partition: (memo.total(partition), partition))


class _Memo:
    """Exact costs by group; knows when the budget is used up, which only costs that are asked for count against.

    Attributes:
        coming: Gives the groups that may be asked for next, the likeliest first.
    """

    def __init__(self, costs: Costs, budget: int, at_once: int = 1) -> None:
        self.costs, self.left, self.at_once = costs, budget, at_once
        self.known: dict[Members, float] = {}
        self.ahead: dict[Members, float] = {}  # computed, and not asked for so far
        self.coming: Callable[[], Iterable[Members]] = tuple

    def __call__(self, group: Members) -> float:
        if group not in self.known:
            if group not in self.ahead:
                self._compute(group)
            self.known[group] = self.ahead.pop(group)
            self.left -= 1
        return self.known[group]

    def _compute(self, group: Members) -> None:
        """The cost of this group, and of as many that may be asked for next as are computed together."""
        batch, most = {group: None}, min(self.at_once, self.left)
        for other in self.coming() if most > 1 else ():
            if len(batch) == most:
                break
            if other not in self.known and other not in self.ahead:
                batch[other] = None
        self.ahead |= zip(batch, self.costs(list(batch)), strict=True)

    def total(self, partition: Grouping) -> float:
        return sum(self(group) for group in partition)


def _proxy(pairs: np.ndarray, partition: Grouping) -> float:
    return float(sum(pairs[np.ix_(group, group)].sum() for group in partition))


def _labels(partition: Sequence[Sequence[int]], heads: int) -> np.ndarray:
    labels = np.zeros(heads, dtype=np.int64)
    for g, group in enumerate(partition):
        labels[list(group)] = g
    return labels


def _groups(labels: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(labels == g).tolist() for g in range(labels.max() + 1)]


def _starts(pairs: np.ndarray, groups: int, seed: int) -> Iterator[np.ndarray]:
    """Labels `[K]`: neighbours, greedy growth, then random partitions."""
    heads = len(pairs)
    yield _labels(neighbours(heads, groups), heads)
    left, greedy = list(range(heads)), []
    while left:
        group = [left.pop(0)]
        while len(group) < heads // groups:
            nearest = min(left, key=lambda h: (pairs[group, h].sum(), h))
            left.remove(nearest)
            group.append(nearest)
        greedy.append(group)
    yield _labels(greedy, heads)
    generator = np.random.default_rng(seed)
    for _ in range(STARTS):
        yield generator.permutation(np.arange(heads) % groups)


def _swap_gains(pairs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """`[K, K]` change of the pair-cost sum if two heads of different groups change places."""
    member = labels[:, None] == np.arange(labels.max() + 1)[None, :]
    to = pairs @ member  # [K, G] cost of each head towards each group
    own = to[np.arange(len(labels)), labels]
    change = to[:, labels] + to[:, labels].T - 2 * pairs - own[:, None] - own[None, :]
    change[labels[:, None] == labels[None, :]] = np.inf
    return change


def _descend(pairs: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    """Best-swap descent on the pair-cost sum from one start, as groups."""
    labels = labels.copy()
    scale = float(pairs.max()) or 1.0
    while True:
        change = _swap_gains(pairs, labels)
        a, b = np.unravel_index(int(change.argmin()), change.shape)
        if not change[a, b] < -1e-9 * scale:
            return _groups(labels)
        labels[a], labels[b] = labels[b], labels[a]


def _swapped(partition: Grouping, labels: np.ndarray, h: int, k: int) -> tuple[Members, Members]:
    """The groups of two heads after they have changed places."""
    a, b = partition[labels[h]], partition[labels[k]]
    return tuple(sorted({*a, k} - {h})), tuple(sorted({*b, h} - {k}))


def _asked_for(
    partition: Grouping, labels: np.ndarray, swaps: Sequence[tuple[int, int]], begin: int
) -> Iterator[Members]:
    """The groups whose costs a walk over `swaps` from `begin` on asks for, if none of them is made."""
    yield from partition
    for number in range(begin, len(swaps)):
        yield from _swapped(partition, labels, *swaps[number])


def _refine(pairs: np.ndarray, memo: _Memo, partition: Grouping) -> Grouping:
    """Swap descent on exact costs, most promising swaps first, while the budget lasts."""
    moved = True
    while moved and memo.left > 0:
        moved = False
        labels = _labels(partition, len(pairs))
        change = _swap_gains(pairs, labels)
        order = np.argsort(change, axis=None, kind="stable")
        swaps = [divmod(int(flat), len(pairs)) for flat in order[: np.isfinite(change).sum()]]
        swaps = [(h, k) for h, k in swaps if h < k]
        for number, (h, k) in enumerate(swaps):
            if memo.left <= 0:
                break
            memo.coming = partial(_asked_for, partition, labels, swaps, number)
            a, b = partition[labels[h]], partition[labels[k]]
            new_a, new_b = _swapped(partition, labels, h, k)
            if memo(new_a) + memo(new_b) < memo(a) + memo(b) - 1e-12:
                others = [group for group in partition if group not in (a, b)]
                partition, moved = canonical([*others, new_a, new_b]), True
                break
    return partition


# --- files ---------------------------------------------------------------------------------------------


def read_groupings(path: str | Path, modules: Mapping[str, tuple[int, int]]) -> dict[str, Grouping]:
    """Partitions from a JSON file, one for each module.

    The file holds either one partition for all modules (`[[0, 2], [1, 3]]`), or an object from module path
    (or layer number) to partition, on its own or under the key `grouping` (a manifest of ours).

    Args:
        path: The file.
        modules: Module path -> `(K, G)`: heads now, and groups wanted.

    Returns:
        Module path -> partition as written (the order of groups and heads is kept).

    Raises:
        UsageError: Not such a file, a module is missing, or a partition does not fit.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot be read as JSON ({error})",
            where=f"--grouping {path}",
            fix="give neighbours, search, or a JSON file",
        ) from error
    if isinstance(data, dict) and "grouping" in data:
        data = data["grouping"]
    out = {}
    for module, (heads, groups) in modules.items():
        entry = _entry(data, module)
        if entry is None:
            raise UsageError(
                f"no entry for {module}",
                where=f"--grouping {path}",
                fix="list every module, by path or layer",
            )
        out[module] = _checked(entry, heads, groups, f"--grouping {path}, {module}")
    return out


def _entry(data: Any, module: str) -> Any:
    """What a grouping file says of one module: by path, by layer number, or the same for all."""
    if not isinstance(data, dict):
        return data
    layer = next((part for part in module.split(".") if part.isdigit()), "0")
    return data.get(module, data.get(layer))


def _checked(entry: Any, heads: int, groups: int, where: str) -> Grouping:
    size = heads // groups
    fix = f"write {groups} lists of {size} head numbers from 0 to {heads - 1}, each once"
    if not isinstance(entry, list) or not all(isinstance(group, list) for group in entry):
        raise UsageError("not a list of lists of head numbers", where=where, fix=fix)
    flat = [h for group in entry for h in group]
    if any(isinstance(h, bool) or not isinstance(h, int) for h in flat):
        raise UsageError("head numbers must be whole numbers", where=where, fix=fix)
    if sorted(flat) != list(range(heads)) or [len(group) for group in entry] != [size] * groups:
        raise UsageError(f"not {groups} groups of {size} that hold each head once", where=where, fix=fix)
    return tuple(tuple(group) for group in entry)
