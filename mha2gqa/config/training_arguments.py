"""Options of `transformers.TrainingArguments` that an uptraining run honours; every other one is refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .coerce import Invalid, short
from .option import RECIPE, Config, OptionError, declared, option

OPTIMISER, PRECISION, MEMORY = "Optimiser", "Precision", "Memory"
LOADING, PROCESSES, LOGGING = "Data loading", "Processes", "Logging"


def _passed(help: str, panel: str, **more: Any) -> Any:
    """An option that is handed on where it is given."""
    return option(None, help, panel, where=(RECIPE,), **more)


@dataclass(frozen=True)
class TrainerOptions(Config):
    """What is passed on to `transformers.TrainingArguments`, under the same names."""

    optim: str | None = _passed("Optimiser.", OPTIMISER, unset="adamw_torch_fused")
    optim_args: str | None = _passed("Its further settings, such as `momentum=0.9`.", OPTIMISER)
    optim_target_modules: str | tuple[str, ...] | None = _passed("Modules of galore and apollo.", OPTIMISER)
    weight_decay: float | None = _passed("Weight decay.", OPTIMISER, range=">= 0", unset="0.1")
    adam_beta1: float | None = _passed("First beta of Adam.", OPTIMISER, range=">= 0, < 1", unset="0.9")
    adam_beta2: float | None = _passed("Second beta of Adam.", OPTIMISER, range=">= 0, < 1", unset="0.95")
    adam_epsilon: float | None = _passed("Epsilon of Adam.", OPTIMISER, range="> 0", unset="1e-8")
    max_grad_norm: float | None = _passed(
        "Gradient clipping; 0 clips nothing.", OPTIMISER, range=">= 0, <= inf", unset="1.0"
    )
    neftune_noise_alpha: float | None = _passed("NEFTune noise on the embeddings.", OPTIMISER, range="> 0")
    bf16: bool | None = _passed("Autocast to bfloat16.", PRECISION, unset="on where the GPU has it")
    fp16: bool | None = _passed("Only false is possible: use bf16.", PRECISION, unset="off")
    tf32: bool | None = _passed("TF32 matrix products.", PRECISION)
    full_determinism: bool | None = _passed("Deterministic kernels.", PRECISION, unset="off")
    per_device_train_batch_size: int | None = _passed(
        "Blocks of one forward pass of one process.", MEMORY, range=">= 1", unset="as many as fit"
    )
    per_device_eval_batch_size: int | None = _passed(
        "The same, for held-out blocks.", MEMORY, range=">= 1", unset="as in training"
    )
    gradient_checkpointing: bool | None = _passed(
        "Recompute activations in the backward pass.", MEMORY, unset="off"
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = _passed("Its settings.", MEMORY)
    activation_checkpointing: bool | None = _passed("Newer name of gradient_checkpointing.", MEMORY)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _passed("Its settings.", MEMORY)
    use_liger_kernel: bool | None = _passed("Kernels of liger-kernel, on a GPU.", MEMORY, unset="off")
    liger_kernel_config: dict[str, Any] | None = _passed("Which of them.", MEMORY)
    torch_empty_cache_steps: int | None = _passed(
        "Empty the GPU's cache every so many steps.", MEMORY, range=">= 1"
    )
    dataloader_num_workers: int | None = _passed(
        "Processes that make batches.", LOADING, range=">= 0", unset="0"
    )
    dataloader_pin_memory: bool | None = _passed("Page-locked memory for batches.", LOADING, unset="on")
    dataloader_persistent_workers: bool | None = _passed("Keep those processes.", LOADING)
    dataloader_prefetch_factor: int | None = _passed("Batches each makes ahead.", LOADING, range=">= 1")
    dataloader_multiprocessing_context: str | None = _passed("How they are started.", LOADING)
    accelerator_config: dict[str, Any] | None = _passed("Settings of accelerate.", PROCESSES)
    fsdp: str | bool | None = _passed("Shard the model over processes (FSDP).", PROCESSES)
    fsdp_config: dict[str, Any] | str | None = _passed("Its settings.", PROCESSES)
    deepspeed: dict[str, Any] | str | None = _passed("Config of DeepSpeed.", PROCESSES)
    ddp_backend: str | None = _passed("Backend of torch.distributed.", PROCESSES)
    ddp_timeout: int | None = _passed("Seconds.", PROCESSES, range="> 0", unset="7200")
    ddp_find_unused_parameters: bool | None = _passed("As in DistributedDataParallel.", PROCESSES)
    ddp_bucket_cap_mb: int | None = _passed("As in DistributedDataParallel.", PROCESSES, range="> 0")
    ddp_broadcast_buffers: bool | None = _passed("As in DistributedDataParallel.", PROCESSES)
    ddp_static_graph: bool | None = _passed("As in DistributedDataParallel.", PROCESSES)
    report_to: str | tuple[str, ...] | None = _passed(
        "Trackers: tensorboard, wandb, trackio, …", LOGGING, unset="none"
    )
    run_name: str | None = _passed("Name of the run there.", LOGGING)
    project: str | None = _passed("Project of trackio.", LOGGING)
    trackio_space_id: str | None = _passed("Space of trackio.", LOGGING)
    trackio_bucket_id: str | None = _passed("Bucket of trackio.", LOGGING)
    trackio_static_space_id: str | bool | None = _passed("Static space of trackio.", LOGGING)
    logging_first_step: bool | None = _passed("Also log the first step.", LOGGING, unset="off")
    log_on_each_node: bool | None = _passed("Log on every node.", LOGGING)
    log_level: str | None = _passed("Of transformers.", LOGGING)
    log_level_replica: str | None = _passed("The same, on other processes.", LOGGING)
    include_num_input_tokens_seen: bool | str | None = _passed("Count input tokens.", LOGGING)
    eval_delay: float | None = _passed("Steps before the first evaluation.", LOGGING, range=">= 0")
    debug: str | tuple[str, ...] | None = _passed("Such as underflow_overflow.", LOGGING)

    def conflicts(self) -> Iterator[OptionError]:
        """What training cannot do, and settings of something that is off."""
        if self.fp16:
            yield OptionError(
                "fp16",
                "must be false: its scaled gradients overflow, which looks like divergence",
                "use bf16",
            )
        for name, other in NEEDED.items():
            if getattr(self, name) and not getattr(self, other):
                yield OptionError(name, f"has no effect without `{other}`", f"set `{other}`, or leave it out")
        layerwise = (self.optim or "").startswith(("galore", "apollo"))
        if self.optim_target_modules and not layerwise:
            yield OptionError(
                "optim_target_modules", "is read by the optimisers galore and apollo alone", "leave it out"
            )
        for key in DEALING:
            if key in (self.accelerator_config or {}):
                yield OptionError("accelerator_config", f"{key} is decided by the budget", f"leave {key} out")


# Options that are read beside another one only.
NEEDED = {
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "dataloader_multiprocessing_context": "dataloader_num_workers",
    "dataloader_persistent_workers": "dataloader_num_workers",
    "dataloader_prefetch_factor": "dataloader_num_workers",
    "fsdp_config": "fsdp",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    "liger_kernel_config": "use_liger_kernel",
}
# Keys of accelerator_config that would deal out other batches than the budget's.
DEALING = (
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "use_configured_state",
)
# What the budget, the data or other options of `uptrain` decide; what to use instead.
INSTEAD = {
    "output_dir": "`out`",
    "max_steps": "`alpha` or `tokens`",
    "num_train_epochs": "`alpha` or `tokens`",
    "gradient_accumulation_steps": "`batch_tokens` and `per_device_train_batch_size`",
    "label_smoothing_factor": "`ce_weight` and `temperature`",
    "remove_unused_columns": "`data`",
    "train_sampling_strategy": "`seed`",
    "data_seed": "`seed`",
    "ignore_data_skip": "nothing: data position is always exact",
    "resume_from_checkpoint": "nothing: the same command resumes by itself",
    "restore_callback_states_from_checkpoint": "nothing: the same command resumes by itself",
    "auto_find_batch_size": "`per_device_train_batch_size`",
    "dataloader_drop_last": "nothing: every step has whole batches",
    "load_best_model_at_end": "nothing: the last step is the result",
    "warmup_ratio": "`warmup_steps` (below 1 it is a fraction)",
    "do_train": "nothing",
    "use_cpu": "`device`",
    "eval_strategy": "`eval_steps` and `eval_data`",
    "save_strategy": "`save_steps`",
    "save_only_model": "nothing: without the optimiser's state there is no resuming",
    "enable_jit_checkpoint": "nothing: SIGTERM saves already",
    "label_names": "`data`",
    "do_eval": "`eval_data`",
    "eval_on_start": "nothing: the held-out text is scored before the first step",
    "torch_compile_backend": "`torch_compile`",
    "torch_compile_mode": "`torch_compile`",
    "push_to_hub": "mha2gqa push OUT",
    "logging_strategy": "`logging_steps`",
    "lr_scheduler_kwargs": "`lr_scheduler_type` and `warmup_steps`",
    "parallelism_config": "`fsdp` or `deepspeed`",
    "local_rank": "torchrun",
    "hub_token": "`hf auth login` or HF_TOKEN, and mha2gqa push OUT",
    "hub_model_id": "mha2gqa push OUT",
}
# Without effect on a run; the value that says what happens anyway is accepted.
WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(
        (
            "average_tokens_across_devices",
            "eval_accumulation_steps",
            "greater_is_better",
            "hub_private_repo",
            "hub_revision",
            "hub_strategy",
            "include_for_metrics",
            "length_column_name",
            "metric_for_best_model",
        )
    ),
    **dict.fromkeys(
        (
            "batch_eval_metrics",
            "bf16_full_eval",
            "do_predict",
            "eval_use_gather_object",
            "fp16_full_eval",
            "hub_always_push",
            "logging_nan_inf_filter",
            "prediction_loss_only",
            "save_on_each_node",
            "use_cache",
        ),
        False,
    ),
    **dict.fromkeys(
        ("dataloader_in_order", "disable_tqdm", "eval_do_concat_batches", "skip_memory_metrics"), True
    ),
}


def read_training_args(values: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """TrainingArguments of a run, checked by name, kind, range, and together; None leaves one unset.

    Args:
        values: As given.
        own: Options of `uptrain` itself, which are not given here.

    Raises:
        OptionError: One that a run does not honour, with what to use instead; or a value that cannot be used.
    """
    out = read_each(values, own)
    TrainerOptions(**{name: value for name, value in out.items() if name in declared(TrainerOptions)})
    return out


def read_each(values: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Each of them by itself, without those that None leaves unset.

    Raises:
        OptionError: As `read_training_args`.
    """
    read = {name: read_training_arg(name, value, own) for name, value in values.items()}
    return {name: value for name, value in read.items() if value is not None}


def read_training_arg(name: str, value: Any, own: Collection[str] = ()) -> Any:
    """One of them, by itself.

    Raises:
        OptionError: As `read_training_args`.
    """
    known = declared(TrainerOptions)
    if name in own:
        raise OptionError(name, "is an option of uptrain itself", f"give `{name}` outside of training_args")
    if name in known:
        try:
            return known[name].read(value)
        except Invalid as error:
            raise OptionError(name, f"{error}, not {short(value)}") from error
    if name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]:
        return value
    raise refused(name, [*own, *known])


def refused(name: str, known: Collection[str]) -> OptionError:
    """Why an option of TrainingArguments is not honoured, or is none at all."""
    if name in INSTEAD:
        return OptionError(name, "is decided elsewhere", f"use {INSTEAD[name]}")
    if name in WITHOUT_EFFECT:
        return OptionError(name, "would have no effect", "leave it out")
    near = difflib.get_close_matches(name[:100], known, 1)
    return OptionError(
        name[:100],
        "is neither an option of uptrain nor one of transformers.TrainingArguments that a run honours",
        f"did you mean {near[0]}?" if near else "see docs/options.md",
    )
