"""The rows of the quality table: which configurations, in which order, and what each costs in FLOPs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What happens after heads have been merged: (--refit, --reconstruct).
VARIANTS: dict[str, tuple[bool, bool]] = {
    "merged": (False, False),
    "refit": (True, False),
    "reconstruct": (False, True),
    "refit+reconstruct": (True, True),
}
# Other ways of fitting, on top of `refit+reconstruct` (keys of ReconstructConfig).
FITS: dict[str, dict[str, Any]] = {
    "long": {"steps": 2000, "patience": 12},
    "distill": {"distill_steps": 300},
    "distill-slow": {"distill_steps": 300, "distill_rate": 5e-4},
    "distill-fast": {"distill_steps": 300, "distill_rate": 2e-3},
    "distill-long": {"distill_steps": 1000},
    "gentle": {"learning_rate": 1e-3},
    "long+distill": {"steps": 2000, "patience": 12, "distill_steps": 300},
    "distill-only": {"steps": 0, "distill_steps": 1000},
}
VARIANTS |= {f"refit+reconstruct+{name}": (True, True) for name in FITS}


def fit_words(variant: str) -> dict[str, Any]:
    """How the fit of a variant differs from the default."""
    return FITS.get(variant.removeprefix("refit+reconstruct+"), {})


START = "refit+reconstruct"  # where joint+… uptraining starts, unless its row names another variant
OBJECTIVES = ("mean+ce", "mean+kd", "mean+mix", "joint+ce", "joint+kd", "joint+mix", "original+ce")


@dataclass(frozen=True)
class Row:
    """One configuration to measure.

    Args:
        stage: `baselines`, `convert`, `tune` or `uptrain`.
        method: Merging method, `original`, or start and objective (`joint+kd`).
        groups: KV heads G.
        variant: A key of `VARIANTS`; `weights-only` and `neighbours` are special cases of `joint`. Of an
            uptrained row: where it started, if that is not `START`.
        seed: Seed of sampling, of the order of the data.
        alpha: Share of the original tokens that is uptrained.
        lr: Peak learning rate, None for the one that tuning chose.
    """

    stage: str
    method: str
    groups: int
    variant: str = ""
    seed: int = 0
    alpha: float | None = None
    lr: float | None = None

    @property
    def key(self) -> str:
        """A readable name, unique in a table, that `--only` searches."""
        parts = [self.stage, self.method, f"G{self.groups}", self.variant]
        parts += [f"alpha{self.alpha:g}"] if self.alpha is not None else []
        parts += [f"lr{self.lr:g}"] if self.lr is not None else []
        return "/".join([*filter(None, parts), f"seed{self.seed}"])

    def to_dict(self) -> dict[str, Any]:
        """Key and fields, without those that do not apply."""
        return {"key": self.key} | {k: v for k, v in asdict(self).items() if v not in (None, "")}


def baseline_rows(num_kv_heads: int, groups: Sequence[int]) -> Iterator[Row]:
    """The original, then the paper's poolings."""
    yield Row("baselines", "original", num_kv_heads)
    for g in groups:
        yield from (Row("baselines", method, g) for method in ("mean", "first", "random"))


def convert_rows(
    groups: Sequence[int], methods: Sequence[str], variants: Sequence[str], seeds: Sequence[int]
) -> Iterator[Row]:
    """Calibrated merging; the first seed of everything before the further seeds of what is stochastic."""
    for variant in variants:
        for method in methods:
            yield from (Row("convert", method, g, variant, seeds[0]) for g in groups)
    if "joint" in methods:
        yield from (Row("convert", "joint", g, v) for v in ("weights-only", "neighbours") for g in groups)
    for seed in seeds[1:]:
        for variant in variants:
            if VARIANTS[variant][1]:
                yield from (Row("convert", m, g, variant, seed) for m in methods for g in groups)


def uptrain_rows(
    stage: str,
    num_kv_heads: int,
    groups: Sequence[int],
    alphas: Sequence[float],
    seeds: Sequence[int],
    lrs: Sequence[float | None],
    objectives: Sequence[str] = OBJECTIVES,
    start: str = START,
) -> Iterator[Row]:
    """Every start and objective, each at every rate in `lrs`; small budgets first."""
    other = "" if start == START else start
    for seed in seeds:
        for alpha in alphas:
            for name in objectives:
                variant = other if name.startswith("joint") else ""
                for g in [num_kv_heads] if name.startswith("original") else groups:
                    yield from (Row(stage, name, g, variant, seed, alpha, lr) for lr in lrs)


@dataclass(frozen=True)
class Shape:
    """What a forward pass costs.

    Args:
        matrix: Parameters that every token is multiplied by (all matrices, the head among them).
        attention: Those of the attention projections alone.
        scores: Sum over layers of `heads * head_dim`, for attention scores.
        head: Those of the output head.
    """

    matrix: int
    attention: int
    scores: int
    head: int = 0

    def forward(self, window: int) -> float:
        """FLOPs per token of a forward pass over causal windows: matrices, then scores and mixing."""
        return 2.0 * self.matrix + 2.0 * window * self.scores

    def fit(self, window: int, whole_layer: bool, trained: bool = False) -> float:
        """FLOPs of one token visit to each layer while its attention is fitted to a target.

        Forward and backward of attention (3 x forward); where the target is the whole layer's output, also
        forward and the gradient of the input (2 x forward) through its frozen rest, or 3 x forward through a rest
        that is trained, too.
        """
        rest = 2.0 * (self.matrix - self.attention - self.head)
        return 3.0 * (2.0 * self.attention + 2.0 * window * self.scores) + (2 + trained) * rest * whole_layer


def model_shape(model: Any) -> Shape:
    """The `Shape` of a loaded causal language model."""
    config = model.config.get_text_config()
    parameters = dict(model.named_parameters())  # tied ones once
    matrices = {name: p.numel() for name, p in parameters.items() if p.dim() >= 2}
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    looked_up = 0 if head is table else table.numel()  # a row that is looked up costs nothing
    looked_up += sum(n for name, n in matrices.items() if name.endswith(("wpe.weight", "position.weight")))
    attention = sum(n for name, n in matrices.items() if re.search(r"attn\.|attention\.", name))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scores = config.num_hidden_layers * config.num_attention_heads * head_dim
    return Shape(sum(matrices.values()) - looked_up, attention, scores, head.numel())


def uptrain_flops(student: Shape, teacher: Shape | None, tokens: int, window: int) -> float:
    """Forward and backward of the student (3 x forward), and the teacher's forward."""
    per_token = 3 * student.forward(window) + (teacher.forward(window) if teacher else 0.0)
    return tokens * per_token


def convert_flops(
    source: Shape,
    student: Shape,
    window: int,
    tokens: int,
    visits: int,
    fitted: bool,
    whole_layer: bool,
    trained: bool = False,
) -> float:
    """An estimate of what calibration costs on a model, merging itself left out.

    Args:
        source, student: Before and after.
        window: Tokens per block.
        tokens: Calibration tokens: read once for the statistics, and where modules are fitted once more by
            the source (targets) and twice by the student (moments for the refit, and past the fitted module).
        visits: Token visits to each layer by regression.
        fitted: Whether anything was fitted.
        whole_layer: Whether the target was a layer's output, not the attention module's.
        trained: Whether all of the layer was trained.
    """
    total = tokens * source.forward(window)
    if fitted:
        total += tokens * (source.forward(window) + 2 * student.forward(window))
    return total + visits * student.fit(window, whole_layer, trained)
