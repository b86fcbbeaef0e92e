"""A dry run: everything about a recipe that can be checked without weights and without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..calibration.sampling import CALIBRATION, DATA, check_decoder
from ..checkpoints.hf_config import is_encoder_decoder, longest_context
from ..config import Recipe, ReportConfig
from ..config.convert import DEFAULT_METHOD
from ..config.option import declared
from ..config.pair_options import GENERATE, PairConfig
from ..data import PairOptions, read_documents
from ..data.seq2seq import is_audio
from ..data.sniffing import exists, parted
from ..errors import UsageError
from ..evaluation import gates
from ..evaluation.generation_metrics import named_metrics
from ..report import FORMATS, becomes, hub_name, human_bytes, significant
from ..uptraining import Budget, UptrainConfig, plan_budget
from ..uptraining.budget import wanted_tokens
from .builtin import PREFIX, TEXTS, resolve_model
from .check_pairs import check_pairs
from .describe import read_config
from .estimate import PlanResult, plan
from .report_data import decoding_context


def rehearse(recipe: Recipe) -> tuple[list[dict[str, Any]], list[str]]:
    """Check a recipe and say what it would do.

    Args:
        recipe: `source` may also be a config file, so that a recipe is checked without its model.

    Returns:
        Planned stages, and warnings: warnings of the plan, and what could not be checked.

    Raises:
        UsageError, UnsupportedModelError, CheckpointError, DataError: What the run would fail on.
    """
    source = resolve_model(recipe.source)
    config = read_config(source)
    context = decoding_context(recipe, config)
    warnings = [] if recipe.report.context in (context, ReportConfig.context) else [_capped(recipe, context)]
    stages: list[dict[str, Any]] = []
    for groups in recipe.sweep.groups if recipe.sweep and recipe.sweep.groups else [recipe.convert.groups]:
        found = plan(
            source,
            groups=groups,
            wide=recipe.convert.wide or 1,
            as_=recipe.convert.as_ or "auto",
            batch=recipe.report.batch,
            context=context,
            effort=recipe.convert.effort,
            fit=recipe.convert.fit,
        )
        warnings += found.warnings
        stages.append(_planned("convert", _convert_detail(recipe, found)))
    _check_generate(recipe, config)
    check_pairs(recipe, source, config, network=False)
    texts = [*recipe.convert.calibration, *recipe.evaluate.data]
    stages.append(_planned("evaluate", _evaluate_detail(recipe, config)))
    if recipe.uptrain is not None:
        texts += [*recipe.uptrain.data, *recipe.uptrain.eval_data]
        for alpha in _alphas(recipe):
            stages.append(_planned("uptrain", _uptrain_detail(recipe, source, config, alpha)))
    for text in dict.fromkeys(x for x in texts if x != GENERATE):
        warnings += check_text(text, recipe, config)
    for name in recipe.report.formats:
        if name not in (*FORMATS, "card"):
            raise UsageError(
                f"{name!r} is not a format", where="report.formats", fix=f"{', '.join([*FORMATS, 'card'])}"
            )
    stages.append(_planned("report", ", ".join(recipe.report.formats)))
    return stages, list(dict.fromkeys(warnings))


def _check_generate(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse text that the original is to write and cannot."""
    trained = recipe.uptrain.data if recipe.uptrain is not None else ()
    for option, texts in ((CALIBRATION, recipe.convert.calibration), (DATA, trained)):
        if GENERATE in texts:
            check_decoder(config, option)


def gate_limits(recipe: Recipe) -> dict[str, Any]:
    """The gates of `report` that are set, by name."""
    found = {name: getattr(recipe.report, name, None) for name in gates.GATES}
    return {name: limit for name, limit in found.items() if limit is not None}


def check_limits(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse gates that need a figure which the recipe does not measure.

    Args:
        recipe: The recipe.
        config: Raw config of its source.

    Raises:
        UsageError: The gate, and what it needs.
    """
    metrics = named_metrics(recipe.evaluate.metrics, is_audio(config))
    for name, limit in gate_limits(recipe).items():
        gates.check_limits(2, False, metrics=metrics, where=f"report.{name}", **{name: limit})


def _planned(name: str, detail: str) -> dict[str, Any]:
    return {"name": name, "status": "planned", "detail": detail, "seconds": 0.0}


def _capped(recipe: Recipe, context: int) -> str:
    return (
        f"report.context {recipe.report.context:,}: the model was built for {context:,} tokens; sizes are "
        "quoted for those"
    )


def _alphas(recipe: Recipe) -> tuple[float | None, ...]:
    return recipe.sweep.alphas if recipe.sweep is not None else (None,)


def _convert_detail(recipe: Recipe, found: PlanResult) -> str:
    heads, kv = found.num_kv_heads, found.kv_bytes_per_token
    method: str = recipe.convert.method or DEFAULT_METHOD
    if recipe.sweep and recipe.sweep.methods:
        method = ", ".join(recipe.sweep.methods)
    ratio = kv["before"] / kv["after"] if kv["after"] else 1.0
    return (
        f"{becomes(found.model_type, found.result_type)}, {heads['before']} KV heads -> {heads['after']}, method {method}; "
        f"KV cache {human_bytes(kv['before'])} -> {human_bytes(kv['after'])} a token ({significant(ratio)}× smaller); "
        f"writes {human_bytes(found.bytes['after'])}"
    )


def _evaluate_detail(recipe: Recipe, config: Mapping[str, Any]) -> str:
    words = recipe.evaluate
    limit = longest_context(config)
    if words.window is not None and limit is not None and words.window > limit:
        raise UsageError(
            f"is longer than the {limit:,} tokens the model was built for",
            where=f"evaluate.window {words.window:,}",
            fix=f"at most {limit}",
        )
    usual = "pairs" if _are_pairs(words.data[0], recipe, config) else "window"
    return f"protocol {words.protocol or usual} on {', '.join(words.data)}"


def _uptrain_detail(recipe: Recipe, source: str, config: Mapping[str, Any], alpha: float | None) -> str:
    if alpha == 0:
        return "alpha 0: no uptraining"
    run = _uptrain_config(recipe, alpha)
    if run.objective == "pairs" or (run.objective == "auto" and _are_pairs(run.data[0], recipe, config)):
        return f"{wanted_tokens(run, recipe.source)[0]:,.0f} target tokens of pairs, whose lengths are read first"
    budget = rehearse_budget(recipe, source, alpha)
    assert budget is not None
    return budget.sentence()


def _are_pairs(name: str, recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Whether a local name holds what an encoder-decoder trains on and is scored on."""
    if not is_encoder_decoder(config) or name in TEXTS or name.startswith(PREFIX):
        return False
    if is_audio(config):
        return True
    sections = (recipe.evaluate, recipe.convert, recipe.uptrain)
    keys = {key: value for section in sections if section is not None for key, value in section.items()}
    known = {key: value for key, value in keys.items() if key in declared(PairConfig)}
    return exists(parted(name)[0]) and PairOptions.of(PairConfig(**known)).open(name, audio=False).fits()


def rehearse_budget(recipe: Recipe, source: str, alpha: float | None = None) -> Budget | None:
    """The uptraining budget of a recipe, None for alpha 0 of a sweep.

    Raises:
        UsageError: It is invalid, or rounds to no step.
    """
    from ..uptraining.prepare import choose_window

    if alpha == 0:
        return None
    config = _uptrain_config(recipe, alpha)
    window = choose_window(config.window, read_config(source), recipe.source)
    return plan_budget(config, window=window, name=recipe.source)


def _uptrain_config(recipe: Recipe, alpha: float | None) -> UptrainConfig:
    assert recipe.uptrain is not None
    words = recipe.uptrain.options()
    if alpha is not None:
        words.pop("tokens", None)
        words["alpha"] = alpha
    data = tuple(words.pop("data"))
    known = {k: v for k, v in words.items() if k != "training_args"}
    return UptrainConfig("model", "out", data, training_args=words.get("training_args", {}), **known)


def check_text(name: str, recipe: Recipe, config: Mapping[str, Any]) -> list[str]:
    """Read the first document, or pair, of a local name; a hub name is only noted.

    Raises:
        UsageError: No such file, and no hub name.
        DataError: It cannot be read.
    """
    if name in TEXTS:
        return []
    if name.startswith(PREFIX):
        raise UsageError("no such built-in text", where=name, fix=f"{', '.join(TEXTS)} are there")
    local = exists(parted(name)[0]) or any(sign in name for sign in "*?[")
    if not local and hub_name(name.split(":", 1)[0]):
        return [f"not checked without a network: {name}"]
    if _are_pairs(name, recipe, config):
        return []
    column = recipe.evaluate.text_column or recipe.convert.text_column or "text"
    next(iter(read_documents([name], text_column=column)), None)
    return []
