"""Calibrated conversion: text and a model give moments, groupings, merged heads, and fitted weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import heads
from .architectures import AttentionSite, AttentionSpec, Geometry
from .calibration import Batch, Statistics, collect, fingerprint, load_statistics, site_key
from .checkpoint import Checkpoint
from .data import read_documents, span_corruption, token_blocks
from .data.spans import sentinel_ids
from .errors import DataError, UsageError
from .evaluation import block_loss
from .grouping import evaluations, read_groupings, search
from .inmemory import assemble, plan_model
from .kv_cache import known_config
from .loading import free_memory, load_model, load_tokenizer, resolve_device, weight_bytes
from .merging.sharing import sharing
from .planning import Groupings, Plan, Site, SiteRewriter, site_context
from .reconstruct import LayerFit, ReconstructConfig, reconstruct

CALIBRATED = ("joint", "align")  # methods that know which heads fit together, and use moments
WINDOW = 512
HELD_OUT = 16  # blocks of the text kept back to judge the result by
Stage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CalibrationOptions:
    """What calibrated conversion may use, and which stages it makes.

    Args:
        texts: Files, folders, globs or hub names.
        tokens: How many tokens of them to use, held-out ones included.
        window: Tokens of a block.
        text_column: Column of the text in JSONL and Parquet.
        statistics: File of saved moments: used if it exists, else written.
        grouping: `neighbours`, `search` or a file; None means search for `joint` and `align`; `given` keeps
            what the plan holds.
        refit, reconstruct: Stages after merging; None means both, with text.
        fit: How those stages work.
        device: Where the model runs.
        seed: Of the order of blocks.
        trust_remote_code: Consent to code that the source brings along.
        stage: Called with the name of the stage, what is done of it and how much there is.
    """

    texts: tuple[str, ...] = ()
    tokens: int = 524_288
    window: int = WINDOW
    text_column: str = "text"
    statistics: str | None = None
    grouping: str | None = None
    refit: bool | None = None
    reconstruct: bool | None = None
    fit: ReconstructConfig = field(default_factory=ReconstructConfig)
    device: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False
    stage: Stage | None = None

    def fitted(self) -> ReconstructConfig | None:
        """The stages after merging, or None if there are none."""
        refit = bool(self.texts) if self.refit is None else self.refit
        regress = bool(self.texts) if self.reconstruct is None else self.reconstruct
        if not (refit or regress):
            return None
        if not self.texts:
            raise UsageError(
                "needs text", where="--refit" if refit else "--reconstruct", fix="give --calibration TEXT"
            )
        return replace(self.fit, refit=refit, regress=regress, seed=self.seed)

    def say(self, stage: str, done: int, total: int) -> None:
        """Report progress, if anyone listens."""
        if self.stage:
            self.stage(stage, done, total)


@dataclass
class Calibrated:
    """What calibration decided.

    Args:
        plan: The conversion, groupings included.
        rewriters: One per attention module of the checkpoint.
        about: Text, tokens, losses, seconds: for the result and the manifest.
        fits: One per fitted module.
    """

    plan: Plan
    rewriters: list[SiteRewriter]
    about: dict[str, Any] = field(default_factory=dict)
    fits: list[LayerFit] = field(default_factory=list)


def calibrate(checkpoint: Checkpoint, plan: Plan, options: CalibrationOptions) -> Calibrated:
    """Choose groupings, merge, and fit, as far as the options and the text allow.

    Args:
        checkpoint: The source.
        plan: The conversion with neighbouring heads sharing.
        options: Text and stages.

    Returns:
        The plan with groupings, and rewriters that give the new tensors.

    Raises:
        UsageError: Options that need text, or contradict the method.
        DataError: The text is too short.
    """
    fitted = options.fitted()
    check_grouping(plan, options.grouping)
    if options.texts and not (options.statistics and Path(options.statistics).exists() and fitted is None):
        return _with_model(checkpoint, plan, options, fitted)
    statistics = None
    if options.statistics:
        statistics = load_statistics(options.statistics)
        _check_owner(statistics, plan, checkpoint.read)
    plan = grouped(plan, checkpoint.read, statistics, options)
    rewriters = [SiteRewriter(plan, s, checkpoint.shapes, checkpoint.read, statistics) for s in plan.sites]
    return Calibrated(plan, rewriters, _about(statistics))


def check_grouping(plan: Plan, how: str | None) -> None:
    """Refuse a search for methods that have no measure of what fits together."""
    if how == "search" and plan.method not in CALIBRATED:
        raise UsageError(
            f"--method {plan.method} has no cost to search by",
            where="--grouping search",
            fix="use joint or align",
        )


def _about(statistics: Statistics | None) -> dict[str, Any]:
    return {} if statistics is None else {"statistics": dict(statistics.about)}


def _check_owner(statistics: Statistics, plan: Plan, read: Callable[[str], Tensor]) -> None:
    owner = statistics.about.get("model")
    if owner and owner != fingerprint([site.site for site in plan.sites], read):
        raise UsageError(
            "measured on another model", where="--statistics", fix="give another file name or remove the file"
        )


# --- groupings -----------------------------------------------------------------------------------------


def grouped(
    plan: Plan, read: Callable[[str], Tensor], statistics: Statistics | None, options: CalibrationOptions
) -> Plan:
    """`plan` with the groupings the options ask for.

    Args:
        plan: With neighbours.
        read: Tensor name -> tensor.
        statistics: Moments, if there are any.
        options: `grouping` is what counts.
    """
    how = options.grouping or ("search" if plan.method in CALIBRATED else "neighbours")
    if how in ("neighbours", "given"):
        return plan
    if how != "search":
        counts = {s.site.path: (s.geometry.num_kv_heads, len(s.grouping)) for s in plan.sites}
        return plan.regrouped(read_groupings(how, counts))
    return plan.regrouped(_searched(plan, read, statistics, options))


def _searched(
    plan: Plan, read: Callable[[str], Tensor], statistics: Statistics | None, options: CalibrationOptions
) -> Groupings:
    """The best groupings found: one for each module, or one for all where heads may only move together."""
    found: dict[str, heads.Grouping] = {}
    together: dict[tuple[str, int, int], list[Any]] = {}
    for done, site in enumerate(plan.sites):
        options.say("grouping", done, len(plan.sites))
        count, groups = site.geometry.num_kv_heads, len(site.grouping)
        freedom = plan.spec.permutable_of(site.site.kind)
        found[site.site.path] = site.grouping
        if groups in (1, count) or freedom == "never":
            continue
        # Small eigenproblems: a processor solves thousands of them faster than a GPU.
        device = "cpu" if count // groups * site.geometry.head_dim <= 512 else None
        tensors = {role: read(name).to(device) for role, name in site.site.names.items()}
        weights = heads.split(plan.spec, site.geometry, tensors)
        context = site_context(plan, site, tensors, statistics)
        problem = sharing(weights, context, "full" if plan.method == "joint" else "rigid")
        if freedom == "model":
            together.setdefault((site.site.kind, count, groups), []).append((site.site.path, problem))
            continue
        budget = evaluations(count // groups * site.geometry.head_dim)
        found[site.site.path] = search(
            problem.pairs().cpu().numpy(), problem.cost, groups, budget=budget, seed=options.seed
        )
    for (_, count, groups), members in together.items():
        problems = [problem for _, problem in members]

        def cost(group: tuple[int, ...], problems: list[Any] = problems) -> float:
            return sum(problem.cost(group) for problem in problems)

        pairs = torch.stack([problem.pairs().cpu() for problem in problems]).sum(0).numpy()
        budget = max(24, evaluations(count // groups * 64) // len(problems))
        shared = search(pairs, cost, groups, budget=budget, seed=options.seed)
        found |= {path: shared for path, _ in members}
    return found


# --- with text: everything happens in memory -----------------------------------------------------------


def _with_model(
    checkpoint: Checkpoint, plan: Plan, options: CalibrationOptions, fitted: ReconstructConfig | None
) -> Calibrated:
    """Run the model on the text; merge and fit in memory; hand the tensors to the writer by role."""
    clock = _Clock()
    inputs, kept = calibration_inputs(checkpoint, options)
    with clock("load"):
        teacher = _load_teacher(checkpoint, options)
    inputs, kept = _to(inputs, teacher.device), _to(kept, teacher.device)
    live = plan_model(teacher, plan.num_kv_heads[1], plan.method, None, plan.seed, plan.attention)
    live = live.regrouped({s.site.path: _disk_site(plan, s.site).grouping for s in live.sites})
    state = teacher.state_dict()
    with clock("statistics"):
        statistics = _statistics(teacher, live, state, inputs, options)
    with clock("grouping"):
        live = grouped(live, state.__getitem__, statistics, options)
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    rewriters = [SiteRewriter(live, s, shapes, state.__getitem__, statistics) for s in live.sites]
    with clock("merge"):
        student = assemble(teacher, live, rewriters, state)
    about = _about(statistics) | {"unique_tokens": _tokens(inputs), "window": options.window}
    about["losses"] = {"original": held_out_loss(teacher, kept), "merged": held_out_loss(student, kept)}
    fits: list[LayerFit] = []
    if fitted is not None:
        rows = len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))
        fitted = replace(fitted, batch_size=min(fitted.batch_size, max(1, rows // 8)))
        with clock("fit"):
            fits = _fit(teacher, student, live, inputs, fitted, options)
        about["losses"]["fitted"] = held_out_loss(student, kept)
        about["fit"] = {name: getattr(fitted, name) for name in fitted.__dataclass_fields__}
        about["token_visits"] = (
            max((fit.steps for fit in fits), default=0) * fitted.batch_size * options.window
        )
    plan = plan.regrouped({_disk_site(plan, s.site).site.path: s.grouping for s in live.sites})
    made = [SiteRewriter(plan, s, checkpoint.shapes, checkpoint.read, None) for s in plan.sites]
    after = student.state_dict()
    for rewriter, source in zip(made, (_of(rewriters, r) for r in made), strict=True):
        tensors = _stored(plan.spec, live, source, after)
        dtypes = {role: checkpoint.read(name).dtype for role, name in rewriter.names.items()}
        report = source.report | {"path": rewriter.site.site.path}
        rewriter.fill({role: tensors[role].to("cpu", dtype) for role, dtype in dtypes.items()}, report)
    for fit in fits:
        row = next(r.report for r in made if _same_site(r, live, fit.path))
        row |= {"error_merged": fit.before, "error_refitted": fit.refitted, "error_fitted": fit.after}
    about["seconds"] = clock.seconds
    return Calibrated(plan, made, about, fits)


class _Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - began, 2)


def calibration_inputs(
    checkpoint: Checkpoint, options: CalibrationOptions
) -> tuple[Batch | Tensor, Batch | Tensor]:
    """Blocks `[N, T + 1]` to calibrate on, and blocks kept back; keyword tensors for encoder-decoders.

    Raises:
        DataError: The text does not fill the blocks that are needed.
    """
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=options.trust_remote_code)
    window = min(options.window, _context(checkpoint.config) or options.window)
    texts = read_documents(options.texts, text_column=options.text_column)
    blocks = token_blocks(tokenizer, texts, window, max_tokens=options.tokens)
    kept = min(HELD_OUT, max(1, len(blocks) // 16))
    if len(blocks) < 2:
        raise DataError(
            f"{blocks.numel()} tokens of calibration text",
            where="--calibration",
            fix=f"give at least {2 * window + 1}, better {options.tokens}",
        )
    if getattr(known_config(checkpoint.config), "is_encoder_decoder", False):
        corrupted = _corrupted(tokenizer, checkpoint.config, blocks[:, :-1], options.seed)
        return ({n: x[:-kept] for n, x in corrupted.items()}, {n: x[-kept:] for n, x in corrupted.items()})
    return blocks[:-kept], blocks[-kept:]


def _corrupted(tokenizer: Any, config: Mapping[str, Any], blocks: Tensor, seed: int) -> Batch:
    """What an encoder-decoder reads and says of blocks `[N, L]` under span corruption.

    Raises:
        UsageError: The model was not pretrained so: it has no sentinels (BART, Marian, Whisper, …).
    """
    if not sentinel_ids(tokenizer):
        raise UsageError(
            f"plain text cannot calibrate {config.get('model_type')} models: they have no span sentinels",
            where="--calibration",
            fix="use --method joint without text, or --statistics measured with calibration.collect",
        )
    made = span_corruption(tokenizer, config, blocks.shape[1], seed)
    encoder, targets = made(blocks.numpy(), range(len(blocks)))
    rows = {"input_ids": encoder, "decoder_input_ids": made.decoder_inputs(targets), "labels": targets}
    return {name: torch.from_numpy(x) for name, x in rows.items()}


def _context(config: Mapping[str, Any]) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def _to(inputs: Batch | Tensor, device: torch.device) -> Batch | Tensor:
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    return {name: x.to(device) for name, x in inputs.items()}


def _model_inputs(inputs: Batch | Tensor) -> Batch | Tensor:
    """Blocks without their targets."""
    if isinstance(inputs, Tensor):
        return inputs[:, :-1]
    return {name: x for name, x in inputs.items() if name != "labels"}


def _tokens(inputs: Batch | Tensor) -> int:
    ids = inputs[:, :-1] if isinstance(inputs, Tensor) else inputs["input_ids"]
    return ids.numel()


def _load_teacher(checkpoint: Checkpoint, options: CalibrationOptions) -> Any:
    """The source in float32 where two copies fit the device, else as stored."""
    options.say("loading", 0, 1)
    device = resolve_device(options.device)
    free, stored = free_memory(device), weight_bytes(checkpoint.path) or 0
    wide = 2 * stored * (4 / max(1, _itemsize(checkpoint)))
    dtype = "float32" if free is None or wide < 0.6 * free else "auto"
    model = load_model(
        checkpoint.path, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code
    )
    return model.requires_grad_(False)


def _itemsize(checkpoint: Checkpoint) -> float:
    infos = checkpoint.tensors.values()
    return checkpoint.nbytes / max(1, sum(torch.Size(info.shape).numel() for info in infos))


def _statistics(
    teacher: Any,
    live: Plan,
    state: Mapping[str, Tensor],
    inputs: Batch | Tensor,
    options: CalibrationOptions,
) -> Statistics | None:
    """Moments, from the file if it exists (and kept there if not); none where the method has no use for them."""
    if live.method not in CALIBRATED:
        return None
    path = Path(options.statistics) if options.statistics else None
    if path and path.exists():
        statistics = load_statistics(path)
        _check_owner(statistics, live, state.__getitem__)
        return statistics
    statistics = collect(
        teacher,
        live.spec,
        _model_inputs(inputs),
        progress=lambda done, total: options.say("statistics", done, total),
    )
    if path:
        statistics.save(path)
    return statistics


def _fit(
    teacher: Any,
    student: Any,
    live: Plan,
    inputs: Batch | Tensor,
    fitted: ReconstructConfig,
    options: CalibrationOptions,
) -> list[LayerFit]:
    done: list[LayerFit] = []

    def progress(fit: LayerFit) -> None:
        done.append(fit)
        options.say("fitting", len(done), len(live.sites))

    return reconstruct(
        teacher,
        student,
        live.spec,
        _model_inputs(inputs),
        fitted,
        progress,
        student_spec=result_spec(live.spec, live),
    )


def result_spec(spec: AttentionSpec, plan: Plan) -> AttentionSpec:
    """The spec of the converted model: another fused layout, for some targets."""
    site = plan.sites[0]
    target = spec.target(site.geometry.num_heads, plan.num_kv_heads[1])
    return spec if target is None else replace(spec, layout=target.layout)


def _stored(
    spec: AttentionSpec, live: Plan, source: SiteRewriter, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Role -> tensor as the checkpoint stores it, from the student's state."""
    g = source.site.geometry
    after = Geometry(g.num_heads, len(source.site.grouping), g.head_dim, g.value_dim)
    names = {role: name for role, name in source.site.site.names.items() if name in state}
    weights = heads.split(
        result_spec(live.spec, live), after, {role: state[name] for role, name in names.items()}
    )
    return heads.unsplit(spec, weights)


def _disk_site(plan: Plan, live: AttentionSite) -> Site:
    return next(s for s in plan.sites if site_key(s.site) == site_key(live))


def _of(rewriters: list[SiteRewriter], disk: SiteRewriter) -> SiteRewriter:
    return next(r for r in rewriters if site_key(r.site.site) == site_key(disk.site.site))


def _same_site(rewriter: SiteRewriter, live: Plan, path: str) -> bool:
    site = next(s.site for s in live.sites if s.site.path == path)
    return site_key(site) == site_key(rewriter.site.site)


@torch.no_grad()
def held_out_loss(model: Any, kept: Batch | Tensor) -> float:
    """Nats per token on the blocks kept back."""
    if isinstance(kept, Tensor):
        return block_loss(model, kept.cpu(), batch_size=4)
    rows = len(next(iter(kept.values())))
    total, count = 0.0, 0
    for i in range(0, rows, 4):
        batch = {name: x[i : i + 4] for name, x in kept.items()}
        scored = int((batch["labels"] != -100).sum())
        total += float(model(**batch).loss) * scored
        count += scored
    return total / max(count, 1)
