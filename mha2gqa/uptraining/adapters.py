"""Which parameters are trained: all, attention only, or LoRA with the pooled keys and values in full."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..architectures import AttentionModule, find_attention_modules, find_spec
from ..errors import TrainingError, UnsupportedModelError, UsageError
from .budget import UptrainConfig
from .run_dir import cleanup_on_error

logger = logging.getLogger(__name__)

LOW_RANK = ("q.", "o.")
EXACT = 1e-4  # largest logit difference a merge in float32 may make, relative to the logits' spread


def model_attention_modules(model: Any, config: Mapping[str, Any]) -> list[AttentionModule]:
    """The attention modules among a model's own parameter names.

    Args:
        model: A model of transformers.
        config: The raw config it was loaded from.

    Raises:
        UnsupportedModelError: None is found.
    """
    modules = find_attention_modules(find_spec(config).in_memory(), model.state_dict())
    if not modules:
        raise UnsupportedModelError(
            "no attention projections found by name", where=type(model).__name__, fix="train all"
        )
    return modules


def train_attention_only(model: Any, config: Mapping[str, Any]) -> list[str]:
    """Freeze everything but the attention projections and what belongs to their heads.

    Returns:
        Names of the parameters that will move.
    """
    names = {name for module in model_attention_modules(model, config) for name in module.names.values()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return sorted(names)


def train_text_only(model: Any) -> list[str]:
    """Freeze what text cannot train in a multimodal model: its towers and what joins them.

    Returns:
        Names of the parameters that keep their values.
    """
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {id(p) for part in parts if part is not None for p in part.parameters()}
    kept = {name: p.requires_grad_(False) for name, p in model.named_parameters() if id(p) not in text}
    return sorted(kept)


def freeze_constants(model: Any) -> list[str]:
    """Freeze what a class of transformers never trains (sinusoidal positions): loading forgets which that is.

    Marian does not even store them: trained, they would be lost with the run.

    Returns:
        Names of the parameters that keep their values.
    """
    with torch.device("meta"):
        fresh = type(model)(model.config)
    kept = {name for name, p in fresh.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.requires_grad_(False)
    return sorted(kept)


@dataclass(frozen=True)
class AdapterPlan:
    """Which modules get what.

    Args:
        full: Modules trained whole: pooled K/V (the fused projection where there is one), their norms.
        low_rank: Modules that get LoRA.
    """

    full: tuple[str, ...]
    low_rank: tuple[str, ...]


def plan_adapter(model: Any, config: Mapping[str, Any]) -> AdapterPlan:
    """Map q, k, v and o to the modules a model really has.

    A fused projection holds the pooled heads, so it is trained whole and only the output projection
    stays low-rank.
    """
    full: dict[str, None] = {}
    low: dict[str, None] = {}
    for module in model_attention_modules(model, config):
        for role, name in module.names.items():
            projection = name.rpartition(".")[0]
            (low if role.startswith(LOW_RANK) else full)[projection] = None
    return AdapterPlan(tuple(full), tuple(low))


def add_adapter(model: Any, config: Mapping[str, Any], run: UptrainConfig) -> Any:
    """Wrap a model for LoRA training.

    Args:
        model: The float32 student.
        config: Its raw config.
        run: `lora_r`, `lora_alpha`, `lora_dropout`, `seed`.

    Returns:
        A `peft.PeftModel`, whose pooled keys and values train in full.

    Raises:
        UsageError: peft is not installed.
        TrainingError: peft did not wrap what was asked for.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError(
            "needs the package peft", where=f"train {run.train}", fix="pip install peft"
        ) from error
    plan = plan_adapter(model, config)
    torch.manual_seed(run.seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=run.lora_r,
            lora_alpha=run.lora_alpha,
            lora_dropout=run.lora_dropout,
            target_modules=list(plan.low_rank),
            modules_to_save=list(plan.full),
            bias="none",
            task_type=None,
        ),
    )
    _check_wrapped(wrapped, plan, run)
    moving = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    logger.info(
        "training %d tensors: %d modules in full (%s, …), %d by LoRA of rank %d (%s, …)",
        len(moving),
        len(plan.full),
        plan.full[0],
        len(plan.low_rank),
        run.lora_r,
        plan.low_rank[0],
    )
    return wrapped


def _check_wrapped(wrapped: Any, plan: AdapterPlan, run: UptrainConfig) -> None:
    """peft drops LoRA silently where a module is also trained in full: every module must move."""
    moving = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    wanted = [f"{m}.lora_A." for m in plan.low_rank] + [f"{m}.modules_to_save." for m in plan.full]
    lost = [path for path in wanted if not any(path in name for name in moving)]
    if lost:
        raise TrainingError(
            f"peft does not train {', '.join(lost[:3])}",
            where=f"train {run.train}",
            fix="use train attention",
        )


@torch.no_grad()
def merge_adapter(
    wrapped: Any,
    folder: Path,
    name: str,
    stored: torch.dtype,
    batch: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, dict[str, float]]:
    """Save the adapter, merge it in float32, and prove that the merged model is the adapter model.

    Args:
        wrapped: The trained `PeftModel`, float32.
        folder: Where the adapter goes.
        name: The checkpoint it belongs to.
        stored: The dtype the merged weights will be stored in.
        batch: What the two are compared on; by default some ids.

    Returns:
        The merged model, and the largest logit differences to the adapter model relative to the logits'
        spread: `exact` in float32, `stored` after rounding to `stored`.

    Raises:
        TrainingError: They differ.
    """
    wrapped.eval()
    wrapped.peft_config["default"].base_model_name_or_path = name
    with cleanup_on_error(folder):
        wrapped.save_pretrained(folder)
    device = next(wrapped.parameters()).device
    batch = probe(wrapped, device) if batch is None else {key: x.to(device) for key, x in batch.items()}
    before = wrapped(**batch, use_cache=False).logits.float()
    merged = wrapped.merge_and_unload()
    difference = {"exact": relative_difference(merged, batch, before)}
    rounded = {n: p.detach().to("cpu", stored) for n, p in merged.named_parameters()}
    kept = {n: p.detach().to("cpu", copy=True) for n, p in merged.named_parameters()}
    for n, p in merged.named_parameters():
        p.copy_(rounded[n])
    difference["stored"] = relative_difference(merged, batch, before)
    for n, p in merged.named_parameters():
        p.copy_(kept[n])
    if not difference["exact"] <= EXACT:
        raise TrainingError(
            f"merging changed the logits by {difference['exact']:.2g} of their spread",
            where=folder,
            fix="the adapter is kept there; load it with peft",
        )
    logger.info(
        "merged adapter: logits within %.1e of their spread, %.1e after rounding to %s",
        difference["exact"],
        difference["stored"],
        str(stored).removeprefix("torch."),
    )
    return merged, difference


def probe(model: Any, device: torch.device | str) -> dict[str, torch.Tensor]:
    """What a model reads to be compared with another: its first ids, in the decoder too where there are two."""
    ids = torch.arange(min(64, model.config.get_text_config().vocab_size), device=device)[None]
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    )


def relative_difference(model: Any, batch: Mapping[str, torch.Tensor], wanted: torch.Tensor) -> float:
    """Largest difference of a model's logits on a batch to `wanted` ones, over the spread of those."""
    logits = model(**batch, use_cache=False).logits.float()
    return float((logits - wanted).abs().max() / wanted.std().clamp_min(1e-12))
