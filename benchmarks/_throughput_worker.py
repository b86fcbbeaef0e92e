"""One measurement of training speed in one process of a (possibly distributed) run; see uptrain_throughput.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mha2gqa.uptraining import loss, train_model
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.interruption import Interrupted
from mha2gqa.uptraining.teacher import Teacher
from mha2gqa.uptraining.throughput import flops_per_token, peak_flops, training_flops

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
}
LOGS_LEFT_OUT = 2  # readings that hold compilation and warm-up
RATE, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


def build(
    shape: str, groups: int, dtype: torch.dtype, device: torch.device, seed: int, attention: str
) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device itself."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPES[shape], num_key_value_heads=groups, attn_implementation=attention)
    with device:
        return LlamaForCausalLM(config).to(dtype)


def rate_of(marks: list[tuple[int, float]], tokens_per_step: int) -> float:
    """Median tokens/s between (step, time) marks, without the first ones."""
    pairs = list(pairwise(marks))[LOGS_LEFT_OUT:]
    return statistics.median((b[0] - a[0]) * tokens_per_step / (b[1] - a[1]) for a, b in pairs)


def ours(args: argparse.Namespace, student: Any, teacher: Any, blocks: Tensor) -> dict[str, Any]:
    """mha2gqa's own training step."""
    more: dict[str, Any] = {"fsdp": True} if args.parallel == "fsdp" else {}
    if not torch.cuda.is_available() and args.world > 1:
        more["ddp_backend"] = "gloo"
    calls: list[int] = []
    if args.contender == "liger":
        more["use_liger_kernel"] = True
        count_calls(calls)
    if args.stop_at:
        stop_after(args.stop_at)
    try:
        result = train_model(
            student,
            blocks,
            teacher=teacher,
            folder=args.folder,
            tokens=args.steps * args.batch_tokens,
            batch_tokens=args.batch_tokens,
            per_device_train_batch_size=args.micro,
            learning_rate=RATE,
            logging_steps=args.log_every,
            save_steps=args.save_steps,
            torch_compile=args.compile,
            residual_dtype=args.residual_dtype,
            device="auto" if torch.cuda.is_available() else "cpu",
            **more,
        )
    except Interrupted as error:
        return {"stopped": str(error)}
    logs = result.losses["train"]
    speeds = [entry["tokens_per_second"] for entry in logs][LOGS_LEFT_OUT:] or [0.0]
    return {
        "tokens_per_second": statistics.median(speeds),
        "losses": [[entry["step"], entry["loss"]] for entry in logs],
        "resumed_from": result.resumed_from,
    } | ({"liger_losses": len(calls)} if args.contender == "liger" else {})


def count_calls(calls: list[int]) -> None:
    """Note every loss that Liger's fused kernel computes (distillation has its own)."""
    fused = loss.liger_cross_entropy

    def counted(*words: Any) -> Any:
        calls.append(1)
        return fused(*words)

    loss.liger_cross_entropy = counted


def stop_after(step: int) -> None:
    """Send this process SIGTERM at a step, as a scheduler would."""
    accept = SpikeGuard.accept

    def stopping(self: SpikeGuard, at: int, *rest: Any) -> bool:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return accept(self, at, *rest)

    SpikeGuard.accept = stopping  # type: ignore[method-assign]


class Rows(torch.utils.data.Dataset):
    """Blocks as a script would feed them: input_ids and labels of T tokens."""

    def __init__(self, blocks: Tensor, count: int) -> None:
        self.blocks, self.count = blocks, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = self.blocks[i % len(self.blocks), :-1]
        return {"input_ids": ids, "labels": ids}


class WithLoss(nn.Module):
    """A model that returns its loss, so that the loss is compiled with it, as nanoGPT's forward does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Mean next-token loss of blocks `[B, T + 1]`, or the KL to `wanted` logits."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        if wanted is not None:
            return whole_kl(logits, wanted)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Marks(TrainerCallback):
    """Times of log entries."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append((state.global_step, time.perf_counter()))


class PlainDistillation(Trainer):
    """The usual few lines: whole logits of both, one KL."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Mean forward KL."""
        logits = model(input_ids=inputs["input_ids"]).logits
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"]).logits
        return whole_kl(logits, wanted)


def whole_kl(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean forward KL over whole logits `[B, T, V]`."""
    q = F.log_softmax(logits.float().flatten(0, 1), -1)
    p = F.log_softmax(wanted.float().flatten(0, 1), -1)
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


def plain_trainer(args: argparse.Namespace, student: Any, teacher: Any, blocks: Tensor) -> dict[str, Any]:
    """A plain Hugging Face Trainer script with the same settings."""
    on_gpu = torch.cuda.is_available()
    per_step = args.batch_tokens // args.window
    more: dict[str, Any] = {"fsdp": True} if args.parallel == "fsdp" else {}
    arguments = TrainingArguments(
        output_dir=args.folder or "unused",
        max_steps=args.steps,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=per_step // args.micro // args.world,
        learning_rate=RATE,
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="linear",
        logging_steps=args.log_every,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=args.compile,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    marks = Marks()
    kind = Trainer if teacher is None else PlainDistillation
    trainer = kind(
        model=student, args=arguments, train_dataset=Rows(blocks, args.steps * per_step), callbacks=[marks]
    )
    if teacher is not None:
        trainer.teacher = torch.compile(teacher) if args.compile else teacher  # type: ignore[attr-defined]
    trainer.train()
    return {"tokens_per_second": rate_of(marks.marks[:-1], args.batch_tokens)}


def nanogpt(args: argparse.Namespace, student: Any, teacher: Any, blocks: Tensor) -> dict[str, Any]:
    """A nanoGPT-style loop on one process: model and loss compiled whole, autocast, fused AdamW, no more.

    Its models never make a mask: transformers would make one under the compiler, and lose the fast kernels.
    """
    device = next(student.parameters()).device
    matrices = [p for p in student.parameters() if p.dim() > 1]
    vectors = [p for p in student.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)
    model: Any = WithLoss(student)
    model = torch.compile(model) if args.compile else model
    guide = torch.compile(teacher) if teacher is not None and args.compile else teacher
    accumulate = args.batch_tokens // args.window // args.micro
    marks: list[tuple[int, float]] = []
    place = 0
    for step in range(1, args.steps + 1):
        for _ in range(accumulate):
            ids = blocks[[(place + i) % len(blocks) for i in range(args.micro)]]
            place += args.micro
            if device.type == "cuda":
                ids = ids.pin_memory().to(device, non_blocking=True)
            wanted = None
            if guide is not None:
                with torch.no_grad():
                    wanted = guide(input_ids=ids[:, :-1], use_cache=False).logits
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(ids, wanted)
            (loss / accumulate).backward()
        nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            loss.item()
            marks.append((step, time.perf_counter()))
    return {"tokens_per_second": rate_of(marks, args.batch_tokens)}


CONTENDERS = {"ours": ours, "liger": ours, "trainer": plain_trainer, "nanogpt": nanogpt}


def main() -> None:
    """Measure and write the record on the first process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--objective", choices=("ce", "kd"), required=True)
    parser.add_argument("--parallel", choices=("none", "ddp", "fsdp"), default="none")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=4)
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--residual-dtype", default="float32")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--save-steps", type=float, default=1e9)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    args.compile, args.world = bool(args.compile), int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    heads = SHAPES[args.shape]["num_attention_heads"]
    AttentionInterface.register("maskless", ALL_ATTENTION_FUNCTIONS["sdpa"])  # a name without mask function
    attention = "maskless" if args.contender == "nanogpt" else "sdpa"
    student = build(args.shape, args.groups, torch.float32, device, 0, attention)
    teacher = None
    if args.objective == "kd":
        dtype = torch.bfloat16 if on_gpu else torch.float32
        teacher = build(args.shape, heads, dtype, device, 1, attention)
        teacher.requires_grad_(False).eval()
    vocabulary = SHAPES[args.shape]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    # Squared uniform draws: a skewed unigram distribution, so that the loss curve has something to learn.
    draws = torch.rand(512, args.window + 1, generator=generator) ** 2
    blocks = (draws * vocabulary).long()
    helper = None if teacher is None else Teacher(teacher)
    flops = training_flops(student, helper, args.window)
    parameters = sum(p.numel() for p in student.parameters())
    attention_share = 1 - flops_per_token(student, 0) / flops_per_token(student, args.window)
    found = CONTENDERS[args.contender](args, student, teacher, blocks)
    if int(os.environ.get("RANK", "0")):
        return
    peak = peak_flops(device)
    rate = found.get("tokens_per_second", 0.0)
    found |= {
        "contender": args.contender,
        "objective": args.objective,
        "parallel": args.parallel,
        "gpus": args.world,
        "shape": args.shape,
        "parameters": parameters,
        "groups": args.groups,
        "window": args.window,
        "micro_batch": args.micro,
        "batch_tokens": args.batch_tokens,
        "compiled": args.compile,
        "residual_dtype": args.residual_dtype,
        "flops_per_token": flops,
        "attention_share_of_flops": attention_share,
        "mfu": None if peak is None else rate * flops / peak / args.world,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }
    Path(args.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
