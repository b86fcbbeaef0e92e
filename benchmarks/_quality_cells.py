"""Which configurations the ledger measures, in which order, and what each one waits for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# Stages of a conversion: refit, regression, and further options of the fit.
FITS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "merged": (False, False, {}),
    "refit": (True, False, {}),
    "fits": (True, True, {}),
    "fits100": (True, True, {"steps": 100}),
    "fits300": (True, True, {"steps": 300}),
    "fits1340": (True, True, {"steps": 1340}),  # a tenth more FLOPs than whole layers
    "layer03": (True, True, {"train": "layer", "rest_rate": 0.03}),
    "layer": (True, True, {"train": "layer", "rest_rate": 0.1}),
    "layer30": (True, True, {"train": "layer", "rest_rate": 0.3}),
    "e2e": (True, True, {}),  # then all layers together, over more text: see `E2E_TOKENS`
}
E2E_TOKENS = 4_194_304
CALIBRATION_TOKENS = 524_288
REST_TOKENS = E2E_TOKENS - CALIBRATION_TOKENS  # for uptraining, where fits and uptraining share `E2E_TOKENS`
PASSES = 3  # over the rest
# Text that an uptraining passes over several times, its part and its name: the tokens of the fits once more, or the rest.
OVER = {
    "calibration": ("calibration", "of the text of the fits"),
    "4.2M": ("uptraining", f"in {PASSES} passes"),
}
# They share one rate; the others are ways to fit of their own.
PLAIN_FITS = ("merged", "refit", "fits", "fits100", "fits300", "e2e")
# Ways that were behind `layer03` on the tuning part: no rows of the table.
TUNED_ONLY = ("fits1340", "layer", "layer30")
# Rates that tuning tries, alike for every start.
RATES = {
    "fit": (1.5e-3, 3e-3, 6e-3),
    "e2e": (5e-4, 1e-3, 2e-3),
    "kd": (5e-4, 1e-3, 2e-3, 4e-3),
    "mix": (2.5e-4, 5e-4, 1e-3),
    "ce": (1.2e-4, 2.5e-4, 5e-4, 1e-3),
}
# Rates that are tried beyond the grid: of a start whose best one lay at its edge.
BEYOND = {("kd", "joint"): (2.5e-4, 1.25e-4, 6.25e-5), ("mix", "joint"): (1.25e-4, 6.25e-5)}
DEFAULT_RATES = {"fit": 3e-3, "e2e": 1e-3, "kd": 1e-3, "mix": 5e-4, "ce": 2.5e-4}
CE_WEIGHT = 0.5  # of the next token's loss in `mix`
# Tokens per step of uptraining that are tried beside the product's own, and their rates: as the root of the step.
STEP_TOKENS = 8_192
STEP_RATES = {"kd": (1.25e-4, 2.5e-4, 5e-4), "mix": (1.25e-4, 2.5e-4, 5e-4)}


@dataclass(frozen=True)
class Cell:
    """One configuration.

    Args:
        start: Merging method, or `original`.
        groups: KV heads G.
        fit: A key of `FITS`; empty for the original.
        text: What calibrates: the `calibration` part, or text that the original `generate`s.
        objective: `kd`, `mix` (half distillation, half text) or `ce` of the uptraining; empty without.
        tokens: Tokens to uptrain; 0 with `equal_to`.
        equal_to: Key of the row whose FLOPs the uptraining fills up.
        seed: Of sampling and of the order of the text.
        part: What it is scored on: `valid`, or `tuning` when a rate is chosen.
        tunes: The rate that is tried: `fit`, `e2e`, `kd`, `mix` or `ce`; empty for a row of the table.
        rate: The rate tried.
        wide: R of wide heads, which hold the cache of `groups`; 1 for plain ones.
        cache: `int8` where keys and values are rounded to 8 bits when it is scored; empty for none.
        batch: Tokens per step of the uptraining; 0 for the product's own choice.
        over: A key of `OVER`: what the uptraining reads several times; empty for as much text as it needs.
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
    batch: int = 0
    over: str = ""

    @property
    def key(self) -> str:
        """A readable name, unique in a ledger."""
        words = [self.start, f"G{self.groups}", f"wide{self.wide}" if self.wide > 1 else "", self.fit]
        words += [self.text] if self.text != "calibration" else []
        words += [f"{self.objective}-{self.tokens / 1e6:.3g}M"] if self.tokens else []
        words += [f"{self.objective}-as[{self.equal_to}]"] if self.equal_to else []
        words += [f"over-{self.over}"] if self.over else []
        words += [f"steps-of-{self.batch}"] if self.batch else []
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

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Cell:
        """The cell that a row of the ledger measured."""
        return cls(**{f.name: entry[f.name] for f in fields(cls) if f.name in entry})

    @property
    def waits_for(self) -> str:
        """Key of the row that must be there first, if any."""
        return self.equal_to

    @property
    def kinds(self) -> list[str]:
        """The kinds of training whose rates it uses."""
        found = ["fit"] * (self.fit in FITS and FITS[self.fit][1]) + ["e2e"] * (self.fit == "e2e")
        return [*found, self.objective] if self.objective else found

    @property
    def estimates(self) -> tuple[float, float]:
        """Rough seconds of the conversion, and of what follows: one of three processes on one H200."""
        start = ESTIMATES[self.fit] + (150.0 if self.text == "generate" else 0.0)
        tokens = self.tokens or (8_000_000 if self.equal_to else 0)
        pace = 85_000 if self.batch else 120_000  # tokens per second; smaller steps are slower
        return start, 10.0 + (4.0 + tokens / pace if self.objective else 0.0)


ESTIMATES = {
    "": 0,
    "merged": 30,
    "refit": 45,
    "fits": 115,
    "fits100": 60,
    "fits300": 75,
    "fits1340": 140,
    "layer": 130,
    "layer03": 130,
    "layer30": 130,
    "e2e": 300,
}


def start_name(cell: Cell, rates: Mapping[str, float]) -> str:
    """The folder name of the conversion that a cell begins with; cells that share one share the name."""
    heads = f"G{cell.groups}" + (f"w{cell.wide}" if cell.wide > 1 else "")
    used = [f"{kind}{rates[kind]:g}" for kind in ("e2e", "fit") if kind in rates]
    return "-".join([cell.start, heads, cell.fit, cell.text, str(cell.seed), *used])


def trained_name(cell: Cell, rates: Mapping[str, float]) -> str:
    """The folder name of what a cell's uptraining makes: of the cell with an exact cache, at its rate."""
    named = f"{replace(cell, cache='', part='valid').key} {rates[cell.objective]:g}"
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def tuning_cells(g: int, tokens: int) -> list[Cell]:
    """Rates of the fits and of distillation; the same grid for every start, and what lies beyond its edge."""
    fits = Cell("joint", g, "fits", part="tuning")
    cells = [replace(fits, tunes="fit", rate=rate) for rate in RATES["fit"]]
    for start, fit in (("joint", "fits"), ("mean", "merged")):
        taught = Cell(start, g, fit, objective="kd", tokens=tokens, part="tuning", tunes="kd")
        cells += [replace(taught, rate=r) for r in (*BEYOND.get(("kd", start), ()), *RATES["kd"])]
    return cells


def text_tuning(g: int, wide: Sequence[int], tokens: int) -> list[Cell]:
    """Rates of uptraining on the text itself, alone and with distillation."""
    plain = Cell("joint", g, "fits", tokens=tokens, part="tuning")
    mixed = [replace(plain, objective="mix", tunes="mix", rate=rate) for rate in RATES["mix"]]
    beyond = [replace(mixed[0], rate=rate) for rate in BEYOND["mix", "joint"]]
    alone = [replace(plain, objective="ce", tunes="ce", rate=rate) for rate in RATES["ce"]]
    return [*beyond, *mixed, *(replace(cell, wide=r) for r in wide for cell in mixed), *alone]


def few_unique(groups: Sequence[int], tokens: int, rest: int) -> list[Cell]:
    """Fits and uptraining on `E2E_TOKENS` in all, seen once or several times; and on the text of the fits alone.

    Args:
        groups: G to reach.
        tokens: To uptrain on the text of the fits.
        rest: Tokens that the fits leave of `E2E_TOKENS`.
    """
    cells = []
    for g in groups:
        once = [replace(row(g, rest), batch=STEP_TOKENS) for row in (_taught, _mixed)]
        again = replace(_taught(g, PASSES * rest), over="4.2M")
        cells += [*once, again, replace(_taught(g, tokens), over="calibration")]
    return cells


def shorter_fits(groups: Sequence[int], budgets: Sequence[int], seeds: Sequence[int]) -> list[Cell]:
    """Mean pooling and shorter fits, distilled for the FLOPs of plain fits that were; the first budget with all seeds."""
    cells = []
    for seed, tokens in [*((seed, budgets[0]) for seed in seeds), *((seeds[0], n) for n in budgets[1:])]:
        for like in (_taught(n, tokens) for n in groups):  # of seed 0: seeds differ in no FLOPs
            shorter = replace(like, tokens=0, equal_to=like.key, seed=seed)
            cells += [replace(_mean_like(like), seed=seed)]
            cells += [replace(shorter, fit=fit) for fit in ("refit", "fits100", "fits300")]
    for row in (_taught, _mixed):  # on the same tokens
        cells += [replace(row(n, tokens), fit="fits300") for tokens in budgets for n in groups]
    return cells


def other_fits(groups: Sequence[int], tokens: int, seeds: Sequence[int]) -> list[Cell]:
    """Ways to fit beside the plain one: rates at the first G, then fits, distillation and the mixture at each."""
    cells = []
    for name in (name for name in FITS if name not in PLAIN_FITS):
        fit = Cell("joint", groups[0], name)
        cells += [replace(fit, part="tuning", tunes="fit", rate=rate) for rate in RATES["fit"]]
        chosen = [] if name in TUNED_ONLY else seeds
        for made in (replace(fit, groups=n, seed=seed) for seed in chosen for n in groups):
            cells += [made, *(replace(made, objective=kind, tokens=tokens) for kind in ("kd", "mix"))]
    return cells


def small_steps(g: int, tokens: int) -> list[Cell]:
    """Rates of uptraining in steps of `STEP_TOKENS`."""
    plain = Cell("joint", g, "fits", tokens=tokens, part="tuning", batch=STEP_TOKENS)
    return [
        replace(plain, objective=kind, tunes=kind, rate=r) for kind in STEP_RATES for r in STEP_RATES[kind]
    ]


def further_tuning(g: int) -> list[Cell]:
    """Rates of what the bold cells do not need."""
    fits = Cell("joint", g, "fits", part="tuning", tunes="fit")
    cells = [replace(fits, start=s, rate=rate) for s in ("mean", "align") for rate in RATES["fit"]]
    return cells + [replace(fits, fit="e2e", tunes="e2e", rate=rate) for rate in RATES["e2e"]]


def planned(
    num_kv_heads: int,
    groups: Sequence[int],
    alphas: tuple[int, int],
    seeds: Sequence[int],
    bold: Sequence[int] = (4, 2),
    wide: Sequence[int] = (),
    rest: int = REST_TOKENS,
) -> list[Cell]:
    """Every cell, most wanted first.

    Args:
        num_kv_heads: Of the original.
        groups: G to reach.
        alphas: Uptraining tokens of the small and of the large budget.
        seeds: Of the bold cells; the others get the first.
        bold: G of the bold cells, and G of the bold cell of the large budget.
        wide: R of wide heads to measure beside the plain ones (see `same_bytes`).
        rest: Tokens to uptrain where fits and uptraining share `E2E_TOKENS`.
    """
    small, large = alphas
    g, g_large = bold
    original = Cell("original", num_kv_heads)
    control = replace(original, objective="ce", tokens=small)
    fits = Cell("joint", g, "fits")
    generated = replace(fits, text="generate")
    cells = [original, *tuning_cells(g, small), *tuned_wide(g, wide, small)]
    cells += [replace(fits, groups=n, wide=r) for n in bold for r in (1, *wide[:1]) if n % r == 0]
    cells += [replace(fits, groups=2 * g)] if 2 * g <= num_kv_heads else []
    cells += [_mean_like(replace(fits, groups=n, objective="kd", tokens=small)) for n in bold]
    cells += [*text_tuning(g, wide[:1], small), generated, *small_steps(g, small)]
    cells += [replace(control, part="tuning", tunes="ce", rate=rate) for rate in RATES["ce"]]
    for seed in seeds:
        cells += same_bytes(num_kv_heads, bold, wide[:1], small, seed)
        cells += on_text(num_kv_heads, bold, wide[:1], small, seed)
        if seed == seeds[0]:  # the large budget, and what the wide rows cost spent on the others
            taught = replace(fits, groups=g_large, objective="kd", tokens=large)
            cells += [replace(taught, wide=r) for r in (*wide[:1], 1) if g_large % r == 0]
            cells += [replace(taught, groups=g), control, replace(original, cache="int8")]
            cells += [replace(fits, groups=n, objective="ce", tokens=small) for n in bold]
            cells += [replace(c, objective="mix") for c in cells if c.objective == "kd" and c.tokens == large]
            cells += [_mixed(2 * g, large)] if 2 * g <= num_kv_heads else []
            cells += [replace(_mixed(g, large), wide=r) for r in wide[:1] if g % r == 0]
            cells += equal_to_wide(num_kv_heads, bold, wide[:1], small)
    for r in wide[1:]:
        for rows in (same_bytes, on_text):
            for seed in seeds[:2]:
                cells += [c for c in rows(num_kv_heads, bold, [r], small, seed) if c.wide == r]
    cells += equal_to_wide(num_kv_heads, bold, wide[1:], small)
    taught = [row(n, small) for n in dict.fromkeys((*bold, *groups)) for row in (_taught, _mixed)]
    taught += [replace(c, wide=r) for c in taught for r in wide[:1] if c.groups in bold and c.groups % r == 0]
    cells += [replace(c, batch=STEP_TOKENS) for c in taught]
    cells += few_unique(list(dict.fromkeys((*bold, *groups))), small, rest)
    cells += other_fits(list(dict.fromkeys((*bold, *groups))), small, seeds)
    cells += _rest(num_kv_heads, groups, wide, alphas, seeds, bold, rest)
    return list({cell.key: cell for cell in cells}.values())


def _rest(
    num_kv_heads: int,
    groups: Sequence[int],
    wide: Sequence[int],
    alphas: tuple[int, int],
    seeds: Sequence[int],
    bold: Sequence[int],
    rest: int,
) -> list[Cell]:
    """Every other G, budget and method with the first seed, then what the bold rows leave of the other seeds."""
    small, large = alphas
    control = Cell("original", num_kv_heads, objective="ce", tokens=large)
    others = [n for n in groups if n not in bold]
    cells = [c for n in others for c in (Cell("joint", n, "fits"), _taught(n, small), _mixed(n, small))]
    twice = [replace(c, groups=2 * c.groups, cache="int8") for c in cells]  # the same bytes
    cells += [c for c in twice if c.groups < num_kv_heads]
    cells += [control, *(row(n, large) for n in others for row in (_mixed, _taught))]
    cells += further_tuning(bold[0])
    cells += [Cell("joint", n, "e2e") for n in (*bold, *others)]
    cells += [Cell("joint", n, "fits", text="generate") for n in groups]
    for n in groups:  # the same FLOPs of mean + kd
        rows = [Cell("joint", n, "fits"), Cell("joint", n, "e2e"), _taught(n, small), _taught(n, large)]
        cells += [_mean_like(c) for c in rows]
    for n in groups:
        cells += [Cell("joint", n, fit) for fit in ("merged", "refit")]
        cells += [Cell("mean", n, "merged"), Cell("align", n, "fits"), Cell("mean", n, "fits")]
        cells += [Cell("mean", n, "merged", objective="ce", tokens=small)]
    cells += shorter_fits(groups, alphas, seeds)
    large_rows = [row(n, large) for n in bold for row in (_taught, _mixed)]
    cells += [replace(c, wide=r) for r in wide for c in large_rows if c.groups % r == 0]
    cells += [
        Cell("joint", n, fit, wide=r) for n in bold for r in wide if n % r == 0 for fit in ("merged", "refit")
    ]
    for seed in seeds:
        cells += [replace(row(bold[1], large), seed=seed) for row in (_taught, _mixed)]
        cells += [Cell("joint", bold[0], "e2e", seed=seed)]
        cells += [replace(_taught(bold[0], PASSES * rest), over="4.2M", seed=seed)]
        cells += [Cell("joint", bold[0], "fits", text="generate", seed=seed)]
    return cells


def _taught(groups: int, tokens: int) -> Cell:
    """The default conversion, distilled on so many tokens."""
    return Cell("joint", groups, "fits", objective="kd", tokens=tokens)


def _mixed(groups: int, tokens: int) -> Cell:
    """The same with half of the loss from the text."""
    return replace(_taught(groups, tokens), objective="mix")


def _mean_like(cell: Cell) -> Cell:
    """Mean pooling, distilled for as many FLOPs as a row took."""
    return Cell("mean", cell.groups, "merged", objective="kd", equal_to=cell.key)


def tuned_wide(groups: int, wide: Sequence[int], tokens: int) -> list[Cell]:
    """Rates of wide heads, on the grid of the plain rows, at R = `wide[0]`; fits take the rate of plain ones."""
    return [
        replace(cell, wide=wide[0])
        for cell in tuning_cells(groups, tokens)
        if wide and cell.start == "joint" and cell.tunes == "kd"
    ]


def same_bytes(
    num_kv_heads: int, groups: Sequence[int], wide: Sequence[int], tokens: int, seed: int
) -> list[Cell]:
    """What holds the cache of GQA-G: GQA-G, wide heads, GQA-2G with 8 bits, wide heads at 2G with 8 bits.

    After fits, and after distillation on `tokens`; conversions that others wait for come first.
    """
    starts = []
    for g in groups:
        plain = Cell("joint", g, "fits", seed=seed)
        starts += [replace(plain, wide=r) for r in wide if g % r == 0] + [plain]
        starts += [replace(plain, groups=2 * g)] if 2 * g <= num_kv_heads else []
    starts = list(dict.fromkeys(starts))
    taught = [replace(cell, objective="kd", tokens=tokens) for cell in starts]
    rounded = [c for c in (*starts, *taught) if any(c.groups == 2 * g for g in groups) or c.wide > 1]
    return [*starts, *taught, *(replace(cell, cache="int8") for cell in rounded)]


def on_text(
    num_kv_heads: int, groups: Sequence[int], wide: Sequence[int], tokens: int, seed: int
) -> list[Cell]:
    """The uptrained rows of `same_bytes` with half of the loss from the text."""
    cells = same_bytes(num_kv_heads, groups, wide, tokens, seed)
    return [replace(cell, objective="mix") for cell in cells if cell.objective]


def equal_to_wide(num_kv_heads: int, groups: Sequence[int], wide: Sequence[int], tokens: int) -> list[Cell]:
    """Plain heads distilled for as many FLOPs as wide ones at the same bytes took, fits included."""
    cells = []
    for g in groups:
        for r in (r for r in wide if g % r == 0):
            plain = Cell("joint", g, "fits", objective="kd")
            plain = replace(plain, equal_to=replace(plain, tokens=tokens, wide=r).key)
            cells += [plain]
            cells += [replace(plain, groups=2 * g, cache="int8")] if 2 * g <= num_kv_heads else []
    return cells
