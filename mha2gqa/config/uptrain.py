"""Options of `uptrain`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .coerce import Steps
from .option import ADVANCED, CLI, OUTPUT, TEACHER, TRAINING, WHAT, OptionError, declared, option
from .pair_options import GENERATE, PairConfig
from .training_arguments import read_training_args

Train = Literal["all", "attention", "lora", "qlora"]
Objective = Literal["auto", "next-token", "span-corruption", "pairs"]
Schedule = Literal["linear", "cosine", "wsd", "inverse_sqrt", "constant"]
Residual = Literal["float32", "bfloat16"]
TeacherDtype = Literal["int8"]


@dataclass(frozen=True)
class UptrainConfig(PairConfig):
    """Every option of `uptrain`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    model: str = option(..., "Checkpoint to train: a folder or a Hub id.", WHAT, argument=True, where=(CLI,))
    out: str = option(
        ...,
        "Folder of the result. `out`.uptrain beside it holds the run while it lasts.",
        WHAT,
        argument=True,
        where=(CLI,),
    )
    data: tuple[str, ...] = option(
        ...,
        "Training text, for an encoder-decoder pairs or recordings: file, folder, glob or NAME[:CONFIG[:SPLIT]] of "
        "the Hub. Repeatable. generate: the original samples the text itself.",
        WHAT,
        metavar="DATA",
        names=True,
    )
    alpha: float | None = option(
        None,
        "Budget as a fraction of the original pretraining tokens; 0.05 in the paper. One of `alpha` and `tokens` is "
        "required.",
        WHAT,
        metavar="FRACTION",
        unset="none",
    )
    original_tokens: int | None = option(
        None,
        "Tokens that the original was pretrained on.",
        WHAT,
        metavar="TOKENS",
        range=">= 1",
        unset="known for many public families",
    )
    original_steps: int | None = option(
        None,
        "The same, as steps of `original_batch_tokens`.",
        WHAT,
        metavar="STEPS",
        range=">= 1",
        unset="none",
    )
    original_batch_tokens: int | None = option(
        None, "Tokens of one original step.", WHAT, metavar="TOKENS", range=">= 1", unset="none"
    )
    tokens: int | None = option(
        None,
        "The budget itself, instead of `alpha`; on pairs in target tokens.",
        WHAT,
        metavar="TOKENS",
        range=">= 1",
        unset="none",
    )
    data_weights: tuple[float, ...] | None = option(
        None,
        "Share of the run of each entry of `data`, with commas between them.",
        TRAINING,
        metavar="W,…",
        range="> 0",
        commas=True,
        unset="all documents shuffled together",
    )
    text_column: str = option(
        "text",
        "Column of the text, or of chat messages, in JSONL, Parquet and Hub data.",
        TRAINING,
        metavar="NAME",
    )
    assistant_only_loss: bool = option(
        True, "In chats, only the assistant's tokens carry loss (distillation included).", TRAINING
    )
    window: int | None = option(
        None,
        "Tokens per block.",
        TRAINING,
        metavar="TOKENS",
        range=">= 1",
        unset="the model's positions, at most 2048",
    )
    batch_tokens: int | None = option(
        None,
        "Tokens per optimiser step over all processes.",
        TRAINING,
        metavar="TOKENS",
        range=">= 1",
        unset="16384 to 65536, by the budget",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate.",
        TRAINING,
        range="> 0",
        unset="1e-3 at a width of 512, less for wider models, 3e-5 at most for speech models",
    )
    warmup_steps: Steps | None = option(
        None,
        "Steps of linear warm-up, or a fraction of all below 1.",
        TRAINING,
        range=">= 0",
        unset="min(50, steps / 5)",
    )
    lr_scheduler_type: Schedule = option(
        "linear",
        "Course of the rate. wsd: constant, last 30 % down to 0; inverse_sqrt: T5's, constant during warm-up.",
        TRAINING,
    )
    objective: Objective = option(
        "auto",
        "What is learnt; auto: what the model was pretrained on, of an encoder-decoder pairs where the data has "
        "them.",
        TRAINING,
    )
    dropout: float = option(
        0.0,
        "Probability of every dropout layer; 0, as most models were pretrained.",
        TRAINING,
        range=">= 0, < 1",
    )
    teacher: str | None = option(
        None,
        "Model to distil from; none trains on next-token loss alone.",
        WHAT,
        metavar="MODEL",
        unset="the original that the model was converted from",
    )
    temperature: float = option(1.0, "Temperature of distillation.", TEACHER, range="> 0")
    ce_weight: float = option(
        0.0, "Share of the next-token loss beside distillation.", TEACHER, range=">= 0, <= 1"
    )
    teacher_dtype: TeacherDtype | None = option(
        None,
        "What the teacher's linear layers are rounded to; int8, with a scale for each row, takes half the memory.",
        TEACHER,
        unset="bfloat16 on a GPU, float32 on a CPU",
    )
    teacher_top_k: int | None = option(
        None,
        "Run the teacher once over the training blocks, beforehand, and keep the k likeliest tokens of each "
        "position on disk. The loss is the KL over those and one bucket for all others.",
        TEACHER,
        metavar="K",
        range=">= 1",
        unset="the teacher runs beside the model",
    )
    teacher_cache: str | None = option(
        None,
        "Folder of those, for further runs on the same blocks.",
        TEACHER,
        metavar="DIR",
        unset="removed with OUT.uptrain",
    )
    train: Train = option(
        "all",
        "Parameter set. lora: shared K and V in full, q and o low-rank; qlora: the same over frozen weights in "
        "4 bits.",
        WHAT,
    )
    lora_r: int = option(16, "Rank of the adapters.", TRAINING, range=">= 1")
    lora_alpha: int = option(32, "Scale of the adapters.", TRAINING, range="> 0")
    lora_dropout: float = option(0.0, "Dropout of the adapters.", TRAINING, range=">= 0, < 1")
    eval_data: tuple[str, ...] | None = option(
        None,
        "Held-out text, scored during training. Repeatable.",
        TRAINING,
        metavar="DATA",
        unset="a share of the training data",
        names=True,
    )
    holdout: float = option(
        0.01,
        "Share of the documents held out, by content hash, where there is no `eval_data`.",
        TRAINING,
        range=">= 0, < 1",
    )
    eval_tokens: int = option(
        262_144, "At most this many held-out tokens are scored each time.", TRAINING, range=">= 1"
    )
    streaming: bool = option(
        False, "Read the data as it comes, unshuffled, instead of reading all of it first.", TRAINING
    )
    isolate_documents: bool = option(
        False, "Document masking: packed documents do not attend to each other.", TRAINING
    )
    seed: int = option(
        0, "Seed of everything random: order of the data, dropout, adapters.", range=">= 0, <= 4294967295"
    )
    device: str = option("auto", "Where to train: auto, cpu or cuda.", ADVANCED)
    residual_dtype: Residual = option(
        "float32",
        "Dtype of the residual stream under bf16. bfloat16 moves and keeps half the bytes and rounds after "
        "every layer.",
        ADVANCED,
    )
    torch_compile: bool | None = option(
        None,
        "Compile the decoder layers, once for all of them; the loss beside them. Weights keep their names.",
        ADVANCED,
        unset="on a GPU where the run is long enough to gain",
    )
    save_steps: Steps = option(
        0.1, "Steps between resumable checkpoints, or a fraction of all below 1.", OUTPUT, range="> 0"
    )
    save_total_limit: int = option(2, "How many of them are kept.", OUTPUT, range=">= 1")
    logging_steps: int = option(10, "Steps between log entries.", OUTPUT, range=">= 1")
    eval_steps: int | None = option(
        None, "Steps between held-out evaluations.", OUTPUT, range=">= 1", unset="ten in all"
    )
    keep_checkpoints: bool = option(False, "Leave OUT.uptrain in place at the end.", OUTPUT)
    force: bool = option(False, "Replace an output that mha2gqa wrote.", OUTPUT, where=(CLI,))
    trust_remote_code: bool = option(
        False, "Run model code that comes with a checkpoint (dangerous).", ADVANCED, where=(CLI,)
    )
    training_args: Mapping[str, Any] = field(default_factory=dict)
    """Further `transformers.TrainingArguments`, by their own names: those of `TrainerOptions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own = set(declared(UptrainConfig))
        object.__setattr__(self, "training_args", read_training_args(self.training_args, own))

    def conflicts(self) -> Iterator[OptionError]:
        """Options that exclude or need each other."""
        yield from self._budget_conflicts()
        yield from self._generate_conflicts()
        weights = self.data_weights
        if weights is not None and len(weights) != len(self.data):
            yield OptionError(
                "data_weights", f"must be one weight for each of the {len(self.data)} entries of `data`"
            )
        if weights is not None and self.streaming:
            yield OptionError("data_weights", "excludes `streaming`", "leave one of them out")
        if self.teacher_top_k is not None and self.teacher == "none":
            yield OptionError("teacher_top_k", "requires a teacher", "leave out `teacher` none")
        if self.teacher_dtype is not None and self.teacher == "none":
            yield OptionError("teacher_dtype", "requires a teacher", "leave out `teacher` none")
        if self.teacher_cache is not None and self.teacher_top_k is None:
            yield OptionError("teacher_cache", "requires `teacher_top_k`", "64 is usual")

    @property
    def generates(self) -> bool:
        """Whether the original samples the text."""
        return tuple(self.data) == (GENERATE,)

    def _generate_conflicts(self) -> Iterator[OptionError]:
        if len(self.data) > 1 and GENERATE in self.data:
            yield OptionError(
                "data",
                "generate cannot be combined with other data",
                "give generate, or files, or ./generate for a file",
            )
        if self.generates and self.teacher == "none":
            yield OptionError("data", "generate requires the original", "leave out `teacher` none")
        if self.generates and self.data_weights is not None:
            yield OptionError("data_weights", "excludes `data` generate", "leave it out")

    def _budget_conflicts(self) -> Iterator[OptionError]:
        if self.alpha is not None and self.tokens is not None:
            yield OptionError("alpha", "excludes `tokens`", "give one of the two, not both")
        if self.alpha is not None and not 0 < self.alpha <= 1:
            yield _wrong_alpha(self.alpha)
        steps, batch = self.original_steps, self.original_batch_tokens
        if (steps is None) != (batch is None):
            given, missing = "original_steps", "original_batch_tokens"
            if steps is None:
                given, missing = missing, given
            yield OptionError(given, f"requires `{missing}`", "or give `original_tokens` alone")
        elif steps is not None and batch is not None and self.original_tokens not in (None, steps * batch):
            yield OptionError(
                "original_tokens",
                f"{self.original_tokens:,} is not {steps:,} steps x {batch:,} tokens",
                "give one of the two",
            )


def _wrong_alpha(alpha: float) -> OptionError:
    fix = "give a fraction such as 0.05"
    if 1 < alpha <= 100:
        fix = f"it is a fraction: did you mean {alpha / 100:g} ({alpha:g} %)?"
    if not math.isfinite(alpha):
        fix = "give a fraction such as 0.05"
    return OptionError("alpha", f"must be > 0 and <= 1, not {alpha:g}", fix)
