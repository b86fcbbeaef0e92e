"""Types of keyword arguments, for editors and type checkers. Written by `make docs-reference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from .coerce import Bytes, Steps
from .commands import CacheType, Decoder
from .convert import Attention, Method
from .evaluate import Bos, Metric, Protocol
from .pair_options import Targets, Task
from .reconstruct import Effort, ReconstructConfig
from .uptrain import Objective, Residual, Schedule, TeacherDtype, Train


class PlanKeywords(TypedDict, total=False):
    """Options of `PlanConfig`."""

    groups: int | None
    wide: int
    as_: str
    drop_extra: tuple[str, ...]
    allow_unchecked: bool
    tp: int
    batch: int
    context: int | None
    gpu_memory: Bytes
    gpus: int
    calibration_tokens: int
    effort: Effort | None
    fit: ReconstructConfig | Mapping[str, Any] | None
    uptrain_tokens: int
    bandwidth: Bytes
    revision: str | None


class BenchKeywords(TypedDict, total=False):
    """Options of `BenchConfig`."""

    engine: Decoder
    batch: int
    context: int
    new_tokens: int
    dtype: str
    device: str
    bandwidth: Bytes | None
    memory: tuple[Bytes, ...]
    compile: bool | None
    cache_type: CacheType | None
    precision: str | None
    threads: int | None
    engine_path: Any
    llama_cpp: Any
    trust_remote_code: bool


class ConvertKeywords(TypedDict, total=False):
    """Options of `ConvertConfig`."""

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    task: Task
    source_prefix: str
    targets: Targets
    beams: int
    retry_temperatures: tuple[float, ...]
    method: Method | None
    calibration: Any
    wide: int
    as_: str
    untie: bool
    attention: tuple[Attention, ...]
    calibration_tokens: int
    calibration_window: int | None
    text_column: str
    statistics: str | None
    grouping: str | None
    refit: bool | None
    reconstruct: bool | None
    effort: Effort | None
    fit: ReconstructConfig | Mapping[str, Any] | None
    max_shard_size: Bytes | None
    keep: tuple[str, ...]
    drop_extra: tuple[str, ...]
    allow_unchecked: bool
    force: bool
    device: Any
    seed: int
    revision: str | None
    trust_remote_code: bool


class EvaluateKeywords(TypedDict, total=False):
    """Options of `EvaluateConfig`."""

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    task: Task
    source_prefix: str
    targets: Targets
    beams: int
    retry_temperatures: tuple[float, ...]
    protocol: Protocol
    against: Any
    window: int | None
    stride: int | None
    text_column: str
    batch_size: int
    max_tokens: int | None
    dtype: Any
    device: Any
    bos: Bos
    seed: int
    worst: int
    tasks: tuple[str, ...]
    task_limit: int | None
    metrics: tuple[Metric, ...]
    max_examples: int | None
    trust_remote_code: bool


class UptrainKeywords(TypedDict, total=False):
    """Options of `UptrainConfig` and `TrainerOptions`."""

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    task: Task
    source_prefix: str
    targets: Targets
    beams: int
    retry_temperatures: tuple[float, ...]
    alpha: float | None
    original_tokens: int | None
    original_steps: int | None
    original_batch_tokens: int | None
    tokens: int | None
    data_weights: tuple[float, ...] | None
    text_column: str
    assistant_only_loss: bool
    window: int | None
    batch_tokens: int | None
    learning_rate: float | None
    warmup_steps: Steps | None
    lr_scheduler_type: Schedule
    objective: Objective
    dropout: float
    teacher: str | None
    temperature: float
    ce_weight: float
    teacher_dtype: TeacherDtype | None
    teacher_top_k: int | None
    teacher_cache: str | None
    train: Train
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    eval_data: tuple[str, ...] | None
    holdout: float
    eval_tokens: int
    streaming: bool
    isolate_documents: bool
    seed: int
    device: str
    residual_dtype: Residual
    torch_compile: bool | None
    save_steps: Steps
    save_total_limit: int
    logging_steps: int
    eval_steps: int | None
    keep_checkpoints: bool
    force: bool
    trust_remote_code: bool
    training_args: Mapping[str, Any]
    optim: str | None
    optim_args: str | None
    optim_target_modules: str | tuple[str, ...] | None
    weight_decay: float | None
    adam_beta1: float | None
    adam_beta2: float | None
    adam_epsilon: float | None
    max_grad_norm: float | None
    neftune_noise_alpha: float | None
    bf16: bool | None
    fp16: bool | None
    tf32: bool | None
    full_determinism: bool | None
    per_device_train_batch_size: int | None
    per_device_eval_batch_size: int | None
    gradient_checkpointing: bool | None
    gradient_checkpointing_kwargs: dict[str, Any] | str | None
    activation_checkpointing: bool | None
    activation_checkpointing_kwargs: dict[str, Any] | str | None
    use_liger_kernel: bool | None
    liger_kernel_config: dict[str, Any] | None
    torch_empty_cache_steps: int | None
    dataloader_num_workers: int | None
    dataloader_pin_memory: bool | None
    dataloader_persistent_workers: bool | None
    dataloader_prefetch_factor: int | None
    dataloader_multiprocessing_context: str | None
    accelerator_config: dict[str, Any] | None
    fsdp: str | bool | None
    fsdp_config: dict[str, Any] | str | None
    deepspeed: dict[str, Any] | str | None
    ddp_backend: str | None
    ddp_timeout: int | None
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    report_to: str | tuple[str, ...] | None
    run_name: str | None
    project: str | None
    trackio_space_id: str | None
    trackio_bucket_id: str | None
    trackio_static_space_id: str | bool | None
    logging_first_step: bool | None
    log_on_each_node: bool | None
    log_level: str | None
    log_level_replica: str | None
    include_num_input_tokens_seen: bool | str | None
    eval_delay: float | None
    debug: str | tuple[str, ...] | None


class TrainModelKeywords(TypedDict, total=False):
    """Options of `UptrainConfig` and `TrainerOptions`."""

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    task: Task
    source_prefix: str
    targets: Targets
    beams: int
    retry_temperatures: tuple[float, ...]
    alpha: float | None
    original_tokens: int | None
    original_steps: int | None
    original_batch_tokens: int | None
    tokens: int | None
    data_weights: tuple[float, ...] | None
    text_column: str
    assistant_only_loss: bool
    window: int | None
    batch_tokens: int | None
    learning_rate: float | None
    warmup_steps: Steps | None
    lr_scheduler_type: Schedule
    objective: Objective
    dropout: float
    temperature: float
    ce_weight: float
    teacher_dtype: TeacherDtype | None
    teacher_top_k: int | None
    teacher_cache: str | None
    train: Train
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    eval_data: tuple[str, ...] | None
    holdout: float
    eval_tokens: int
    streaming: bool
    isolate_documents: bool
    seed: int
    device: str
    residual_dtype: Residual
    torch_compile: bool | None
    save_steps: Steps
    save_total_limit: int
    logging_steps: int
    eval_steps: int | None
    keep_checkpoints: bool
    force: bool
    trust_remote_code: bool
    training_args: Mapping[str, Any]
    optim: str | None
    optim_args: str | None
    optim_target_modules: str | tuple[str, ...] | None
    weight_decay: float | None
    adam_beta1: float | None
    adam_beta2: float | None
    adam_epsilon: float | None
    max_grad_norm: float | None
    neftune_noise_alpha: float | None
    bf16: bool | None
    fp16: bool | None
    tf32: bool | None
    full_determinism: bool | None
    per_device_train_batch_size: int | None
    per_device_eval_batch_size: int | None
    gradient_checkpointing: bool | None
    gradient_checkpointing_kwargs: dict[str, Any] | str | None
    activation_checkpointing: bool | None
    activation_checkpointing_kwargs: dict[str, Any] | str | None
    use_liger_kernel: bool | None
    liger_kernel_config: dict[str, Any] | None
    torch_empty_cache_steps: int | None
    dataloader_num_workers: int | None
    dataloader_pin_memory: bool | None
    dataloader_persistent_workers: bool | None
    dataloader_prefetch_factor: int | None
    dataloader_multiprocessing_context: str | None
    accelerator_config: dict[str, Any] | None
    fsdp: str | bool | None
    fsdp_config: dict[str, Any] | str | None
    deepspeed: dict[str, Any] | str | None
    ddp_backend: str | None
    ddp_timeout: int | None
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    report_to: str | tuple[str, ...] | None
    run_name: str | None
    project: str | None
    trackio_space_id: str | None
    trackio_bucket_id: str | None
    trackio_static_space_id: str | bool | None
    logging_first_step: bool | None
    log_on_each_node: bool | None
    log_level: str | None
    log_level_replica: str | None
    include_num_input_tokens_seen: bool | str | None
    eval_delay: float | None
    debug: str | tuple[str, ...] | None
