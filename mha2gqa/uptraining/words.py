"""Words of TrainingArguments that a run decides itself, has no use for, or cannot take so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError

# What the budget or the data decide; the words to use instead.
OWNED = {
    "output_dir": "OUT",
    "max_steps": "alpha or tokens",
    "num_train_epochs": "alpha or tokens",
    "gradient_accumulation_steps": "batch_tokens and per_device_train_batch_size",
    "label_smoothing_factor": "ce_weight and temperature",
    "remove_unused_columns": "data",
    "train_sampling_strategy": "seed",
    "data_seed": "seed",
    "ignore_data_skip": "nothing: data position is always exact",
    "resume_from_checkpoint": "nothing: the same command resumes by itself",
    "auto_find_batch_size": "per_device_train_batch_size",
    "load_best_model_at_end": "nothing: the last step is the result",
    "warmup_ratio": "warmup_steps (below 1 it is a fraction)",
    "do_train": "nothing",
    "use_cpu": "device",
    "eval_strategy": "eval_steps and eval_data",
    "save_strategy": "save_steps",
    "save_only_model": "nothing: without the optimiser's state there is no resuming",
    "enable_jit_checkpoint": "nothing: SIGTERM saves already",
    "label_names": "data",
    "do_eval": "eval_data",
    "eval_on_start": "nothing: the held-out text is scored before the first step",
    "torch_compile_backend": "torch_compile",
    "torch_compile_mode": "torch_compile",
    "push_to_hub": "mha2gqa push OUT",
    "logging_strategy": "logging_steps",
    "lr_scheduler_kwargs": "lr_scheduler_type and warmup_steps",
    "parallelism_config": "fsdp or deepspeed",
    "local_rank": "torchrun",
}
_LOSS_ALONE = "held-out text is scored by its loss, as the model trains"
_NO_UPLOAD = "nothing is uploaded; mha2gqa push OUT does that"
# What a run would not read: the value that says what happens anyway, and what that is.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "average_tokens_across_devices": (None, "a step's loss is the mean over the tokens of all processes"),
    "batch_eval_metrics": (False, _LOSS_ALONE),
    "bf16_full_eval": (False, _LOSS_ALONE),
    "dataloader_in_order": (True, "the order of the blocks is exact"),
    "disable_tqdm": (True, "progress goes to the log"),
    "do_predict": (False, _LOSS_ALONE),
    "eval_accumulation_steps": (None, _LOSS_ALONE),
    "eval_do_concat_batches": (True, _LOSS_ALONE),
    "eval_use_gather_object": (False, _LOSS_ALONE),
    "fp16_full_eval": (False, _LOSS_ALONE),
    "greater_is_better": (None, "the last step is the result"),
    "hub_always_push": (False, _NO_UPLOAD),
    "hub_model_id": (None, _NO_UPLOAD),
    "hub_private_repo": (None, _NO_UPLOAD),
    "hub_revision": (None, _NO_UPLOAD),
    "hub_strategy": (None, _NO_UPLOAD),
    "hub_token": (None, _NO_UPLOAD),
    "include_for_metrics": (None, _LOSS_ALONE),
    "length_column_name": (None, "blocks are of one length"),
    "logging_nan_inf_filter": (False, "a loss that is not finite stops the run"),
    "metric_for_best_model": (None, "the last step is the result"),
    "prediction_loss_only": (False, _LOSS_ALONE),
    "save_on_each_node": (False, "checkpoints go into one folder that all nodes see"),
    "use_cache": (False, "training keeps no key/value cache"),
}
# Least and largest values, and whether they themselves are allowed.
RANGES: dict[str, tuple[float, bool, float, bool]] = {
    "adam_beta1": (0, True, 1, False),
    "adam_beta2": (0, True, 1, False),
    "adam_epsilon": (0, False, math.inf, False),
    "weight_decay": (0, True, math.inf, False),
    "max_grad_norm": (0, True, math.inf, True),
    "neftune_noise_alpha": (0, False, math.inf, False),
    "per_device_eval_batch_size": (1, True, math.inf, False),
    "dataloader_num_workers": (0, True, math.inf, False),
    "ddp_timeout": (0, False, math.inf, False),
}
# Keys of accelerator_config that would deal out other batches than the budget's.
DEALING = (
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "use_configured_state",
)


def check_word(name: str, value: Any) -> None:
    """Refuse what a run would not read, or read as something else than meant.

    Args:
        name: A field of TrainingArguments.
        value: What it is to be, already of its type.

    Raises:
        UsageError: With what to use instead.
    """
    if name in OWNED:
        raise UsageError("is decided elsewhere", where=name, fix=f"use {OWNED[name]}")
    if name in WITHOUT_EFFECT and value != WITHOUT_EFFECT[name][0]:
        raise UsageError("would have no effect", where=name, fix=f"leave it out: {WITHOUT_EFFECT[name][1]}")
    if name == "fp16" and value:
        raise UsageError(
            "its scaled gradients overflow now and then, which the guard takes for divergence",
            where="fp16",
            fix="use bf16, or leave it out to train in float32",
        )
    if name in RANGES and value is not None:
        low, with_low, high, with_high = RANGES[name]
        # Written so that a NaN fails it.
        if not (
            (low < value or (with_low and value == low)) and (value < high or (with_high and value == high))
        ):
            least = f"{'at least' if with_low else 'more than'} {low:g}"
            most = "" if high == math.inf else f" and less than {high:g}"
            raise UsageError(f"{value} is not possible", where=name, fix=f"give {least}{most}")
    if name == "accelerator_config":
        _check_accelerator(value)


def _check_accelerator(value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError("is not a mapping", where="accelerator_config", fix="give KEY: VALUE in a recipe")
    for key in DEALING:
        if key in (value or {}):
            raise UsageError(
                "is decided by the budget", where=f"accelerator_config.{key}", fix="leave it out"
            )


# Words that are read beside another one only.
NEEDED = {
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "dataloader_multiprocessing_context": "dataloader_num_workers",
    "dataloader_persistent_workers": "dataloader_num_workers",
    "dataloader_prefetch_factor": "dataloader_num_workers",
    "fsdp_config": "fsdp",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    "liger_kernel_config": "use_liger_kernel",
}


def check_together(words: Mapping[str, Any]) -> None:
    """Refuse words that are read beside another one only.

    Raises:
        UsageError: That other is missing.
    """
    for name, other in NEEDED.items():
        if words.get(name) and not words.get(other):
            raise UsageError(
                f"has no effect without {other}", where=name, fix=f"set {other}, or leave it out"
            )
    layerwise = str(words.get("optim", "")).startswith(("galore", "apollo"))
    if words.get("optim_target_modules") and not layerwise:
        raise UsageError(
            "is read by the optimisers galore and apollo alone",
            where="optim_target_modules",
            fix="leave it out",
        )
