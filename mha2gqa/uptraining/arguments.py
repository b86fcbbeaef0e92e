"""TrainingArguments of a run: the budget's, ours by default, and the user's options, checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames

from ..config import OptionError, UptrainConfig
from ..distributed import is_launched, world_size
from ..errors import UsageError, quoted
from .budget import Budget
from .deepspeed_config import check_deepspeed
from .json_settings import read_settings
from .launched import ASKED, check_launched
from .model_prep import OWN_LOSS, require_liger

MICRO_BATCH_TOKENS = {"cpu": 4096, "default": 16_384}

# Names that changed between the transformers versions supported.
RENAMED = (("activation_checkpointing", "gradient_checkpointing"),)


def installed_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names that the installed transformers uses.

    Raises:
        OptionError: It has none of that name.
    """
    known = {f.name for f in fields(TrainingArguments) if f.init}
    out: dict[str, Any] = {}
    for name, value in given.items():
        for new, old in RENAMED:
            for ours, theirs in ((new, old), (old, new), (f"{new}_kwargs", f"{old}_kwargs")):
                if name == ours and name not in known:
                    name = theirs
        if name not in known:
            raise OptionError(
                name, f"is not known to transformers {transformers.__version__}", "leave it out"
            )
        out[name] = list(value) if isinstance(value, tuple) else value
    return out


def check_device(device: str) -> bool:
    """Whether a run is on the CPU.

    Args:
        device: `auto`, `cpu` or `cuda`; which GPU a process uses is for its launcher to say.

    Raises:
        UsageError: There is no such device here, or none that is trained on.
    """
    if device not in ("auto", "cpu", "cuda", "cuda:0"):
        raise UsageError(
            "cannot be trained on",
            where=f"device {device}",
            fix="use auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            "there is no GPU that torch can use", where=f"device {device}", fix="leave it out, or use cpu"
        )
    return device == "cpu" or not torch.cuda.is_available()


def _built(options: dict[str, Any]) -> TrainingArguments:
    """The arguments, with the packages that they need.

    Raises:
        UsageError: transformers refuses a value, or a package is missing.
    """
    try:
        args = TrainingArguments(**options)
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()  # it says what is to be installed
        _, used = Trainer.get_optimizer_cls_and_kwargs(args)
        plain = options | {"optim_args": None}
        if args.optim_args and used == Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(**plain))[1]:
            raise UsageError(
                f"is not read by optim {OptimizerNames(args.optim).value}",
                where=f"optim_args {args.optim_args}",
                fix="leave it out",
            )
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(" ".join(str(error).split()), where="training arguments") from error
    return args


def micro_batch(budget: Budget, world: int, device: str, given: int | None) -> int:
    """Blocks per forward pass of one process: as many as fit, dividing the step evenly.

    Raises:
        UsageError: The step cannot be shared out evenly.
    """
    blocks = budget.blocks_per_step
    if blocks % world:
        raise UsageError(
            f"{blocks} blocks a step cannot be shared by {world} processes",
            where="batch_tokens",
            fix=f"give a multiple of {world * budget.window:,}",
        )
    own = blocks // world
    if given is not None:
        if given < 1 or own % given:
            raise UsageError(
                f"does not divide the {own} blocks of a step and process",
                where=f"per_device_train_batch_size {given}",
                fix=f"use one of {', '.join(str(n) for n in range(1, own + 1) if own % n == 0)}",
            )
        return given
    limit = MICRO_BATCH_TOKENS.get(device, MICRO_BATCH_TOKENS["default"]) // budget.window
    return max(n for n in range(1, own + 1) if own % n == 0 and (n <= limit or n == 1))


_FSDP_FIX = 'give a JSON file, or settings such as {"cpu_offload": true}'


def offloads(extra: Mapping[str, Any]) -> bool:
    """Whether FSDP keeps weights, gradients and optimiser on the host.

    Args:
        extra: TrainingArguments as given.

    Raises:
        UsageError: `fsdp_config` cannot be read, or says neither yes nor no.
        CheckpointError: It is a file, and cannot be read.
    """
    config = read_settings(extra.get("fsdp_config") or {}, "fsdp_config", _FSDP_FIX)
    asked = config.get("cpu_offload", config.get("fsdp_cpu_offload", False))
    if not isinstance(asked, bool):
        raise UsageError(f"must be true or false, not {quoted(asked)}", where="fsdp_config cpu_offload")
    return bool(extra.get("fsdp")) and (asked or "offload" in str(extra["fsdp"]))


def backend(on_cpu: bool, offload: bool) -> str | None:
    """What the processes talk through; None leaves the choice to accelerate.

    NCCL alone could not sum the norms of gradients that are on the host.
    """
    if on_cpu:
        return "gloo" if world_size() > 1 else None
    return "cuda:nccl,cpu:gloo" if offload else None


def _own_options(config: UptrainConfig) -> dict[str, Any]:
    """The user's TrainingArguments by the names of the installed transformers, with what liger needs.

    Raises:
        OptionError: A name is not known.
        UsageError: They do not suit how this process was started, what is installed, or each other.
    """
    extra = installed_names(config.training_args)
    if extra.get("fsdp") and not is_launched():
        raise UsageError(
            "shards over several processes, and this is one",
            where="fsdp",
            fix="start with torchrun --nproc_per_node N -m mha2gqa uptrain …, or leave fsdp out",
        )
    for name in ASKED:
        check_launched(name, extra.get(name))
    if extra.get("deepspeed"):
        check_deepspeed(extra["deepspeed"], config.teacher_dtype)
    if extra.get("use_liger_kernel"):
        require_liger()
        extra["liger_kernel_config"] = dict(extra.get("liger_kernel_config") or {}) | OWN_LOSS
    if config.streaming and extra.get("dataloader_num_workers"):
        raise UsageError(
            "each of them would read the whole stream",
            where="dataloader_num_workers",
            fix="leave out one of the two: dataloader_num_workers or streaming",
        )
    return extra


def build_arguments(
    config: UptrainConfig, budget: Budget, folder: Path, default_rate: float, evaluates: bool
) -> TrainingArguments:
    """TrainingArguments of a run: our defaults, then the user's options over them."""
    extra = _own_options(config)
    own_accelerator = extra.pop("accelerator_config", None) or {}
    on_cpu = check_device(config.device)
    device = "cpu" if on_cpu else "cuda"
    micro = micro_batch(budget, world_size(), device, extra.pop("per_device_train_batch_size", None))
    steps = budget.steps
    save_every = config.save_steps if config.save_steps >= 1 else max(1, round(config.save_steps * steps))
    defaults: dict[str, Any] = {
        "learning_rate": config.learning_rate or default_rate,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": device == "cuda" and torch.cuda.is_bf16_supported(),
        "per_device_eval_batch_size": micro,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": 7200,
        "ddp_backend": backend(on_cpu, offloads(extra)),
        "ddp_find_unused_parameters": False,
        "dataloader_num_workers": 0,
        "logging_nan_inf_filter": False,  # a bad loss stops the run; it is never papered over
        "average_tokens_across_devices": False,  # the loss is divided by the step's tokens already
        # FSDP reduces every micro-batch: holding whole gradients until the last would cost 4 bytes a weight.
        "accelerator_config": {
            "gradient_accumulation_kwargs": {"sync_each_batch": bool(extra.get("fsdp"))},
            "non_blocking": not on_cpu,  # batches come from pinned memory: no wait for the step before
        }
        | dict(own_accelerator),
    }
    fixed: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": budget.blocks_per_step // world_size() // micro,
        "seed": config.seed,
        "use_cpu": on_cpu,
        "logging_steps": min(config.logging_steps, steps),
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": config.eval_steps or max(1, -(-steps // 10)),
        "save_strategy": "steps",
        "save_steps": int(save_every),
        "save_total_limit": None,  # rotation waits until the new checkpoint is complete
        "remove_unused_columns": False,
        "label_names": ["labels"],
    }
    known = {f.name for f in fields(TrainingArguments) if f.init}
    args = _built({k: v for k, v in (defaults | extra | fixed).items() if k in known})
    args._n_gpu = min(1, args.n_gpu)  # never nn.DataParallel: several GPUs are used through torchrun
    return args
