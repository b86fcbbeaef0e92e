"""Hugging Face's Trainer with our loss, order of data, guard and checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from ..checkpoints.atomic import write_json
from ..checkpoints.json_files import read_json
from ..checkpoints.loading import quiet
from ..errors import UsageError
from .batches import BlockStream, Position, as_is
from .budget import learning_rate_factor, warmup_count
from .corpus import Corpus
from .distributed_training import check_zero_shards, is_fsdp2, is_zero3, reduce_in_float32, shard_teacher
from .guard import AsyncScalars, SpikeGuard
from .interruption import StopAndSave
from .loss import IGNORE_INDEX, TopKLogProbs
from .prepare import PreparedRun
from .run_dir import RunDirectory, cleanup_on_error, go_back, mark_complete, undamaged
from .teacher import Teacher
from .throughput import Meter, peak_flops, training_flops

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
STATE = "mha2gqa_state.json"  # guard and stream position, beside the Trainer's own state


class UptrainTrainer(Trainer):
    """The Trainer of one run; `model` must be under `distillation.attached`.

    Args:
        model: The student.
        args: From `build_arguments`.
        run: The run.
        corpus: What it trains on.
        teacher: The original, None without one and where its predictions come with the batches.
        stop: Signal numbers received, see `interruption.stop_signals`.
        callbacks: Further callbacks, called after our own.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        run: PreparedRun,
        corpus: Corpus,
        teacher: Teacher | None,
        stop: list[int],
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        window, pairs = run.budget.window, run.budget.pairs
        flops = training_flops(model, teacher, window, pairs)
        self.student_flops = training_flops(model, None, window, pairs)
        stream, stopper = isinstance(corpus.train, IterableDataset), StopAndSave(self.continue_log)
        super().__init__(
            model=model,
            args=args,
            train_dataset=corpus.train,
            eval_dataset=corpus.train if corpus.held_out is not None else None,  # only its presence matters
            data_collator=cast(Any, corpus.collate if stream else as_is),
            callbacks=[stopper, *callbacks],
        )
        if args.fsdp and not self.is_fsdp_enabled:  # accelerate leaves it out without a word
            raise UsageError(
                f"does not shard on {args.device.type}", where="fsdp", fix="leave it out, or train on GPUs"
            )
        self.run, self.corpus, self.teacher, self.stop = run, corpus, teacher, stop
        self.stopper = stopper
        for callback in (PrinterCallback, ProgressCallback):  # they print; logs go through logging
            self.remove_callback(callback)
        if is_fsdp2(self.accelerator):
            reduce_in_float32(self.accelerator)
        sharded = is_fsdp2(self.accelerator) or is_zero3(self.accelerator)
        if teacher is not None and args.world_size > 1 and sharded:
            shard_teacher(teacher.model, getattr(self.accelerator, "torch_device_mesh", None))
        # Our loss is a sum divided by the tokens of the whole step: nothing is left to scale.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        # DeepSpeed steps inside its backward pass: too late to skip a spike, in time to stop.
        factor = 0.0 if self.is_deepspeed_enabled else SpikeGuard.factor
        self.guard = SpikeGuard(math.log(model.config.get_text_config().vocab_size), factor)
        peak = peak_flops(args.device)
        self.meter = Meter(flops, None if peak is None else peak * args.world_size)
        self._sums = torch.zeros(2, device=args.device)  # step loss; cross-entropy since the last log
        self.distils = teacher is not None or corpus.cached
        self._labels = 0
        self._logged_step = 0
        self._resumed: Path | None = None
        self._pending: dict[str, float] | None = None
        self._waiting: tuple[int, int, AsyncScalars] | None = None  # step, labels, values not yet settled

    # --- data ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # The data set itself is in the order of the run.
        return (
            None if isinstance(self.corpus.train, IterableDataset) else SequentialSampler(self.corpus.train)
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """As the Trainer's; after resuming, random numbers go on where the checkpoint left them.

        The first draw of a data loader takes a number itself, so this must come after it.
        """
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._resumed is not None:
            self._load_rng_state(str(self._resumed))
            self._resumed = None
        return samples

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        """Labelled tokens of this step over all processes."""
        if not self.corpus.collate.counts_labels:
            self._labels = self.run.budget.batch_tokens
            return self._labels
        count = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batch_samples)
        if self.args.world_size > 1:
            total = torch.tensor(count, device=self.args.device)
            torch.distributed.all_reduce(total)
            count = int(total)
        self._labels = count
        return count

    # --- loss ---------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This micro-batch's share of the step's mean loss, times the processes that will be averaged."""
        states = self._teacher_states(inputs)
        loss, ce = model(**inputs, teacher_states=states)
        share = self.args.world_size / max(1, int(num_items_in_batch))
        with torch.no_grad():
            self._sums += torch.stack([loss.detach(), ce]).float() * share
        return loss * share

    def _teacher_states(self, inputs: dict[str, Tensor]) -> Tensor | TopKLogProbs | None:
        """Teacher outputs for a batch: computed now, or taken out of the batch."""
        if self.teacher is not None:
            return self.teacher.states(inputs)
        if "teacher_ids" not in inputs:
            return None
        ids, log_probs = inputs.pop("teacher_ids"), inputs.pop("teacher_log_probs")  # [B, T, k]
        # In one object: sharding casts the tensors that it sees among a module's inputs to bf16.
        width = cast(Any, self.corpus.train).caches[0].identity.width
        return TopKLogProbs(ids.flatten(0, 1).long(), log_probs.flatten(0, 1), width)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The step's last stop before the optimiser: a gradient that is not accepted is dropped here.

        The verdict is a number on the device that the optimiser reads there; what it was is known here
        when the next step has been queued, so that the device never waits for this process.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if hasattr(norm, "full_tensor"):  # sharded gradients give a partial norm
            norm = norm.full_tensor()
        self.finish_step()
        device, stop = self._sums.device, float(bool(self.stop))
        size = torch.as_tensor(0.0 if norm is None else norm, device=device)
        values = torch.stack([self._sums[0].double(), size.double(), torch.full_like(size.double(), stop)])
        if self.args.world_size > 1:  # every process must decide alike
            torch.distributed.all_reduce(values)
            values /= self.args.world_size
        else:
            self.stopper.agreed = stop > 0
        self._sums[0] = 0
        rejected = self.guard.rejects(values[0], values[1], self._labels)
        self._waiting = (self.state.global_step + 1, self._labels, AsyncScalars(values))
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        # What GradScaler uses: the fused kernels leave weights and moments alone where this is 1.
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not sharded:
            optimizer.found_inf = rejected.float()
        elif not self.finish_step():
            model.zero_grad(set_to_none=True)  # an optimiser leaves parameters without gradient alone
        return norm

    def finish_step(self) -> bool:
        """Enter the last step in the guard's record.

        Returns:
            Whether its gradient was used.

        Raises:
            TrainingError: See `SpikeGuard.accept`.
        """
        if self._waiting is None:
            return True
        (step, labels, reading), self._waiting = self._waiting, None
        loss, size, stops = reading.wait()
        if self.args.world_size > 1:
            self.stopper.agreed = stops > 0
        accepted = self.guard.accept(step, loss, size, labels)
        if not accepted:
            logger.warning("step %d is skipped: loss %.4g, gradient norm %.4g", step, loss, size)
        return accepted

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm-up and decay of `budget.learning_rate_factor`."""
        if self.lr_scheduler is None:
            config, steps = self.run.config, self.run.budget.steps
            warmup = warmup_count(config.warmup_steps, steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                cast(Any, optimizer or self.optimizer),
                lambda step: learning_rate_factor(step, steps, warmup, config.lr_scheduler_type),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # --- held-out text ------------------------------------------------------------------------------

    def _held_out_batches(self) -> Iterator[dict[str, Tensor]]:
        """This process's batches; every process gets as many, padded with masked rows."""
        assert self.corpus.held_out is not None
        size, world, rank = (
            self.args.per_device_eval_batch_size,
            self.args.world_size,
            self.args.process_index,
        )
        count = len(self.corpus.held_out)
        for start in range(0, count, size * world):
            rows = [min(start + rank * size + i, count) for i in range(size)]
            mine = [min(row, count - 1) for row in rows]
            batch = self.corpus.collate(self.corpus.held_out[mine], keys=mine)
            surplus = torch.tensor([row >= count for row in rows])[:, None]
            batch["labels"] = batch["labels"].masked_fill(surplus, IGNORE_INDEX)
            yield batch

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Mean cross-entropy of the held-out blocks, logged as `eval_loss`."""
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        training = model.training
        model.eval()
        # Eager: a compiled program for the few gradient-free batches would cost more than it saves.
        with self.meter.pause(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in self._held_out_batches():
                batch = self._prepare_inputs(batch)
                loss, _ = model(**batch)
                total += torch.stack([loss.double(), (batch["labels"] != IGNORE_INDEX).sum().double()])
            if self.args.world_size > 1:
                torch.distributed.all_reduce(total)
            loss_value = float(total[0] / total[1].clamp(min=1))
        model.train(training)
        metrics = {f"{metric_key_prefix}_loss": loss_value, f"{metric_key_prefix}_tokens": int(total[1])}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- logging ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed, memory and time left to what the Trainer logs."""
        step, budget = self.state.global_step, self.run.budget
        self.finish_step()
        if "loss" in logs:
            tokens = self.corpus.tokens_at(step, budget)
            ce = self._sums[1].clone()
            if self.args.world_size > 1:
                torch.distributed.all_reduce(ce)
                ce /= self.args.world_size
            self._sums[1] = 0
            if self.distils and float(ce) > 0:
                logs["ce_loss"] = float(ce) / max(1, step - self._logged_step)
            self._logged_step = step
            logs["tokens"] = tokens
            logs |= self.meter.read(tokens, budget.tokens - tokens)
        super().log(logs, start_time)
        if self.is_world_process_zero() and ("loss" in logs or "eval_loss" in logs):
            logger.info("%s", progress_line(step, budget.steps, logs))

    def floating_point_ops(self, inputs: Any) -> int:
        """Model FLOPs of a micro-batch, by the same count as the MFU."""
        budget = self.run.budget
        if budget.pairs is not None:
            return round(self.meter.flops * budget.pairs.targets * len(inputs["labels"]))
        return round(self.meter.flops * inputs["input_ids"].numel())

    # --- checkpoints --------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.finish_step()
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        with self.meter.pause(), quiet():
            with cleanup_on_error(folder):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                unlogged = self._unlogged()  # of all processes
                if self.args.should_save:
                    write_json(folder / STATE, self._own_state() | {"unlogged": unlogged})
                    mark_complete(folder)
            if self.args.should_save:
                RunDirectory.at(folder.parent).rotate(self.run.config.save_total_limit)
            self.accelerator.wait_for_everyone()

    def _own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"guard": self.guard.state(), "stream": None}
        if isinstance(self.corpus.train, BlockStream):
            made = self.state.global_step * self.run.budget.blocks_per_step
            state["stream"] = vars(self.corpus.train.position(made))
        return state

    def _unlogged(self) -> dict[str, float]:
        """Losses summed since the last log entry, which a resumed run adds to its next one."""
        sums = torch.stack([self._tr_loss.float(), self._sums[1]])
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
            sums /= self.args.world_size
        return {"since": self._globalstep_last_logged, "loss": float(sums[0]), "ce": float(sums[1])}

    def continue_log(self) -> None:
        """Put back what `_unlogged` saved; the Trainer starts its own counts at 0."""
        if self._pending is not None:
            self._tr_loss += self._pending["loss"]
            self._sums[1] += self._pending["ce"]
            self._globalstep_last_logged = self._logged_step = int(self._pending["since"])
            self._pending = None

    def restore(self, checkpoint: Path) -> None:
        """Take guard and stream position from a checkpoint, before `train(resume_from_checkpoint=…)`."""
        check_zero_shards(checkpoint, self.args.world_size if self.is_deepspeed_enabled else 0)
        step = int(checkpoint.name.rpartition("-")[2])
        with undamaged(checkpoint / TRAINER_STATE):
            saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
            if saved.global_step != step or not all(isinstance(e, dict) for e in saved.log_history):
                raise ValueError(f"of step {saved.global_step}")
        state = read_json(checkpoint / STATE, fix=go_back(checkpoint))
        with undamaged(checkpoint / STATE):
            self.guard.load(state["guard"])
            self._pending = {key: float(state["unlogged"][key]) for key in ("since", "loss", "ce")}
            position = None if state["stream"] is None else Position(**state["stream"])
        self._resumed = checkpoint
        self.meter.reset(self.corpus.tokens_at(step, self.run.budget))
        if isinstance(self.corpus.train, BlockStream):
            self.args.ignore_data_skip = True  # the stream itself begins where the checkpoint ended
            made = step * self.run.budget.blocks_per_step
            self.corpus.train.start, self.corpus.train.made = position or Position(), made
            self.corpus.train.positions[made] = self.corpus.train.start


def progress_line(step: int, steps: int, logs: Mapping[str, float]) -> str:
    """One line for a person: `step 40/300 loss 3.41 …`."""
    if "eval_loss" in logs:
        return f"step {step}/{steps}  held-out loss {logs['eval_loss']:.4f}"
    parts = [f"step {step}/{steps}", f"loss {logs['loss']:.4f}"]
    if "ce_loss" in logs:
        parts.append(f"CE {logs['ce_loss']:.4f}")
    parts.append(f"lr {logs.get('learning_rate', 0):.2e}")
    parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in logs:
        parts.append(f"MFU {logs['mfu']:.1%}")
    if "memory_gib" in logs:
        parts.append(f"{logs['memory_gib']:.1f} GiB")
    minutes, seconds = divmod(round(logs["eta_seconds"]), 60)
    parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)
