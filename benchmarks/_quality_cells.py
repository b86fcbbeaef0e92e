"""Which configurations the ledger measures, in which order, and what each one waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Entries = Mapping[str, Mapping[str, Any]]  # finished rows by key

# Stages of a conversion: refit, regression, and further options of the fit.
FITS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "merged": (False, False, {}),
    "refit": (True, False, {}),
    "fits": (True, True, {}),
    "fits100": (True, True, {"steps": 100}),
    "fits300": (True, True, {"steps": 300}),
    "e2e": (True, True, {}),  # then all layers together, over more text: see `E2E_TOKENS`
}
E2E_TOKENS = 4_194_304
# Rates that tuning tries, alike for every start.
RATES = {
    "fit": (1.5e-3, 3e-3, 6e-3),
    "e2e": (5e-4, 1e-3, 2e-3),
    "kd": (5e-4, 1e-3, 2e-3, 4e-3),
    "ce": (1.2e-4, 2.5e-4, 5e-4, 1e-3),
}
DEFAULT_RATES = {"fit": 3e-3, "e2e": 1e-3, "kd": 1e-3, "ce": 2.5e-4}


@dataclass(frozen=True)
class Cell:
    """One configuration.

    Args:
        start: Merging method, or `original`.
        groups: KV heads G.
        fit: A key of `FITS`; empty for the original.
        text: What calibrates: the `calibration` part, or text that the original `generate`s.
        objective: `kd` or `ce` of the uptraining; empty without.
        tokens: Tokens to uptrain; 0 with `equal_to`.
        equal_to: Key of the row whose FLOPs the uptraining fills up.
        seed: Of sampling and of the order of the text.
        part: What it is scored on: `valid`, or `tuning` when a rate is chosen.
        tunes: The rate that is tried: `fit`, `e2e`, `kd` or `ce`; empty for a row of the table.
        rate: The rate tried.
        wide: R of wide heads, which hold the cache of `groups`; 1 for plain ones.
        cache: `int8` where keys and values are rounded to 8 bits when it is scored; empty for none.
    """

    start: str
    groups: int
    fit: str = ""
    text: str = "calibration"
    objective: str = ""
    tokens: int = 0
    equal_to: str = ""
    seed: int = 0
    part: str = "valid"
    tunes: str = ""
    rate: float = 0.0
    wide: int = 1
    cache: str = ""

    @property
    def key(self) -> str:
        """A readable name, unique in a ledger."""
        words = [self.start, f"G{self.groups}", f"wide{self.wide}" if self.wide > 1 else "", self.fit]
        words += [self.text] if self.text != "calibration" else []
        words += [f"{self.objective}-{self.tokens / 1e6:.3g}M"] if self.tokens else []
        words += [f"{self.objective}-as[{self.equal_to}]"] if self.equal_to else []
        words += [f"{self.tunes}-rate-{self.rate:g}"] if self.tunes else []
        words += [f"{self.cache}-cache"] if self.cache else []
        return "/".join([*filter(None, words), f"seed{self.seed}"])

    def to_dict(self) -> dict[str, Any]:
        """Key and fields, without those that do not apply."""
        left_out = {"wide": 1}
        return {"key": self.key} | {
            k: v
            for k, v in asdict(self).items()
            if (v not in ("", 0) and v != left_out.get(k)) or k == "seed"
        }

    @property
    def waits_for(self) -> str:
        """Key of the row that must be there first, if any."""
        return self.equal_to

    @property
    def estimate(self) -> float:
        """Rough seconds on one H100, before anything like it was measured."""
        fit = {"": 0, "merged": 10, "refit": 15, "fits": 45, "fits100": 20, "fits300": 25, "e2e": 90}[
            self.fit
        ]
        tokens = self.tokens or (8_000_000 if self.equal_to else 0)
        return 8.0 + fit + (15 + tokens / 150_000 if self.objective else 0)


def tuning_cells(groups: Sequence[int], tokens: int, quick: bool = False) -> Iterator[Cell]:
    """Rates of every kind of training, the same grid for every start."""
    for g in groups:
        for rate in RATES["fit"]:
            for start in ("joint",) if quick else ("joint", "mean", "align"):
                yield Cell(start, g, "fits", part="tuning", tunes="fit", rate=rate)
        for rate in RATES["e2e"]:
            yield Cell("joint", g, "e2e", part="tuning", tunes="e2e", rate=rate)
        for rate in RATES["kd"]:
            for start, fit in (("joint", "fits"), ("mean", "merged")):
                yield Cell(start, g, fit, objective="kd", tokens=tokens, part="tuning", tunes="kd", rate=rate)


def planned(
    num_kv_heads: int,
    groups: Sequence[int],
    alphas: tuple[int, int],
    seeds: Sequence[int],
    bold: Sequence[int] = (4, 2),
    wide: Sequence[int] = (),
) -> list[Cell]:
    """Every cell, most wanted first.

    Args:
        num_kv_heads: Of the original.
        groups: G to reach.
        alphas: Uptraining tokens of the small and of the large budget.
        seeds: Of the bold cells; the others get the first.
        bold: G of the bold cells, and G of the bold cell of the large budget.
        wide: R of wide heads to measure beside the plain ones (see `wide_cells`).
    """
    small, large = alphas
    g, g_large = bold
    original = Cell("original", num_kv_heads)
    control = replace(original, objective="ce", tokens=small)
    cells = [original, *tuning_cells([g], small)]
    cells += [replace(control, part="tuning", tunes="ce", rate=rate) for rate in RATES["ce"]]
    for seed in seeds:  # 1: the bold cells
        cells += [
            Cell("joint", g, "fits", seed=seed),
            Cell("joint", g, "fits", objective="kd", tokens=small, seed=seed),
            Cell("joint", g_large, "fits", objective="kd", tokens=large, seed=seed),
            Cell("joint", g, "e2e", seed=seed),
            Cell("joint", g, "fits", text="generate", seed=seed),
        ]
    cells += [control, replace(control, tokens=large)]
    cells += wide_cells(num_kv_heads, groups, wide, alphas, seeds, g)

    def family(g: int) -> list[Cell]:
        return [
            Cell("joint", g, "fits"),
            Cell("joint", g, "fits", objective="kd", tokens=small),
            Cell("joint", g, "fits", objective="kd", tokens=large),
            Cell("joint", g, "e2e"),
        ]

    for g in groups:  # 2: the same FLOPs of mean + kd, and what they are equal to
        cells += family(g)
        cells += [
            Cell("mean", g, "merged", objective="kd", equal_to=c.key)
            for c in family(g)
            if c.objective or c.fit == "e2e"
        ]
    for g in groups:  # 4: the rest
        cells += [Cell("joint", g, "fits", text="generate")]
        cells += [Cell("joint", g, fit) for fit in ("merged", "refit")]
        cells += [Cell("mean", g, "merged"), Cell("align", g, "fits"), Cell("mean", g, "fits")]
        as_ = Cell("joint", g, "fits", objective="kd", tokens=small).key
        cells += [
            Cell("joint", g, fit, objective="kd", equal_to=as_) for fit in ("refit", "fits100", "fits300")
        ]
        cells += [
            Cell("mean", g, "merged", objective="ce", tokens=small),
            Cell("mean", g, "merged", objective="kd", equal_to=Cell("joint", g, "fits").key),
        ]
    return list({cell.key: cell for cell in cells}.values())


def wide_cells(
    num_kv_heads: int,
    groups: Sequence[int],
    wide: Sequence[int],
    alphas: tuple[int, int],
    seeds: Sequence[int],
    tuned: int,
) -> list[Cell]:
    """Wide heads at the cache of G, beside what else has its bytes: GQA-G, and GQA-2G with an 8-bit cache.

    Rates are tuned at R = `wide[0]`, on the grid of the plain rows; equal budgets count tokens (alpha) and FLOPs.
    """
    if not wide:
        return []
    small, large = alphas
    cells = [
        replace(cell, wide=wide[0])
        for cell in tuning_cells([tuned], small, quick=True)
        if cell.start == "joint" and cell.fit == "fits"
    ]
    for seed in seeds:
        for g in groups:
            plain = Cell("joint", g, "fits", seed=seed)
            taught = replace(plain, objective="kd", tokens=small)
            both = [replace(plain, wide=r) for r in wide if g % r == 0]
            for w in both:
                cells += [w, replace(w, objective="kd", tokens=small)]
            cells += [plain, taught]
            if 2 * g <= num_kv_heads:
                cells += [replace(cell, groups=2 * g, cache="int8") for cell in (plain, taught)]
            for w in both:
                cells += [replace(w, objective="kd", equal_to=taught.key)]
                cells += [replace(w, cache="int8"), replace(w, objective="kd", tokens=large)]
            cells += [replace(plain, objective="kd", tokens=large)]
    for g in groups:
        cells += [Cell("joint", g, fit, wide=r) for r in wide if g % r == 0 for fit in ("merged", "refit")]
    return cells


def chosen_rate(cell: Cell, kind: str, entries: Entries) -> float:
    """The rate of least loss on the tuning part: of this start, at the nearest G that was tuned.

    Wide heads take the rate of wide heads, if one was tuned. A start that was not tuned takes the default.
    """
    if cell.tunes == kind:
        return cell.rate
    tuned = [
        e for e in entries.values() if e.get("tunes") == kind and e["start"] == cell.start and "loss" in e
    ]
    if not tuned:
        return DEFAULT_RATES[kind]
    alike = [e for e in tuned if (e.get("wide", 1) > 1) == (cell.wide > 1)] or tuned
    return min(alike, key=lambda e: (abs(math.log(e["groups"] / cell.groups)), e["loss"]))["rate"]


def rates_pending(cell: Cell, cells: Sequence[Cell], entries: Entries, failed: set[str]) -> bool:
    """Whether a rate that `cell` uses is still being tuned."""
    if cell.start == "original" and not cell.objective:
        return False
    kinds = {"fits": {"fit"}, "e2e": {"fit", "e2e"}}.get(cell.fit.rstrip("013"), set())
    kinds = kinds | ({cell.objective} if cell.objective else set())
    kinds -= {cell.tunes}
    if cell.tunes:  # a rate is tuned on top of those before it
        kinds &= {"fit"} if cell.tunes in ("kd", "e2e") else set()
    return any(
        other.tunes in kinds
        and other.start == cell.start
        and (other.wide > 1) == (cell.wide > 1)
        and other.key not in entries
        and other.key not in failed
        for other in cells
    )
