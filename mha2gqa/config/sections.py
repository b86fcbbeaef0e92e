"""The sections of a recipe as frozen dataclasses. What is not set stays None: the command's default holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from .coerce import yaml_name

Method = Literal["mean", "first", "random", "align", "joint"]
Protocol = Literal["blocks", "window", "wikitext2", "rolling", "span-corruption"]
Train = Literal["all", "attention", "lora", "qlora"]
Objective = Literal["auto", "next-token", "span-corruption"]


@dataclass(frozen=True)
class Section:
    """Base of the sections. A key that is absent stays None, and the command's own default holds."""

    def options(self) -> dict[str, Any]:
        """What was set, as keyword arguments of the section's function."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != ()}


@dataclass(frozen=True)
class FitRecipe(Section):
    """Key `convert.fit`: how hard the stages after merging try.

    Args:
        steps, batch_tokens, batch_size, learning_rate, relative, schedule, warmup: Of the regression of each module.
        ridge: Pull of the refit towards the merged projection.
        unit: Whose output is matched: `attention` or the whole `layer`.
        inputs: Whose stream a module reads meanwhile: `student` or `teacher`.
        holdout, check_every, patience: Early stopping on blocks kept aside.
        distill_steps, distill_rate: Training of all modules together, end to end, after that.
    """

    steps: int | None = None
    batch_tokens: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    relative: bool | None = None
    schedule: Literal["cosine", "linear", "constant"] | None = None
    warmup: float | None = None
    ridge: float | None = None
    unit: Literal["attention", "layer"] | None = None
    inputs: Literal["student", "teacher"] | None = None
    holdout: float | None = None
    check_every: int | None = None
    patience: int | None = None
    distill_steps: int | None = None
    distill_rate: float | None = None


@dataclass(frozen=True)
class ConvertRecipe(Section):
    """Section `convert`: the words of `mha2gqa convert`.

    Args:
        groups: KV heads G of the result (not the group size).
        method: How the heads of a group become one.
        calibration: Files, folders, globs or hub names of the text to calibrate on.
        calibration_tokens, calibration_window: How many tokens of it to use, in blocks of how many.
        text_column: Column of the text in JSONL and Parquet.
        statistics: A file of saved calibration statistics.
        grouping: `neighbours`, `search`, or a file with one partition per layer.
        refit, reconstruct: Stages after merging.
        fit: How hard those try.
        as_: `auto`, `none`, or the model_type to write the source as (`as` in YAML).
        attention: Kinds of attention to convert, of those the model has (`[self, cross]`).
        device, seed, max_shard_size, revision: As on the command line.
    """

    groups: int | None = None
    method: Method | None = None
    calibration: tuple[str, ...] = ()
    calibration_tokens: int | None = None
    calibration_window: int | None = None
    text_column: str | None = None
    statistics: str | None = None
    grouping: str | None = None
    refit: bool | None = None
    reconstruct: bool | None = None
    fit: FitRecipe | None = None
    as_: str | None = None
    attention: tuple[Literal["self", "cross"], ...] = ()
    device: str | None = None
    seed: int | None = None
    max_shard_size: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class EvaluateRecipe(Section):
    """Section `evaluate`: the words of `mha2gqa evaluate`; the models are those of the run.

    Args:
        data: Held-out text.
        text_column: Column of the text.
        protocol: How text becomes scored tokens; the name stands beside every figure.
        window, stride: Tokens.
        batch_size: Windows per forward pass.
        max_tokens: Stop after so many scored tokens.
        dtype, device: Of the models while they are scored.
        bos: `auto`, `always` or `never`: whether a BOS stands before what is scored.
        seed: Of the bootstrap intervals.
        worst: How many of the worst documents to list.
        tasks, task_limit: lm-eval tasks to run as well, and how many examples of each.
        agreement: Also measure agreement with the original on the same tokens.
    """

    data: tuple[str, ...] = ()
    text_column: str | None = None
    protocol: Protocol | None = None
    window: int | None = None
    stride: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None
    bos: Literal["auto", "always", "never"] | None = None
    seed: int | None = None
    worst: int | None = None
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None
    agreement: bool | None = None


@dataclass(frozen=True)
class UptrainRecipe(Section):
    """Section `uptrain`: the words of `mha2gqa uptrain`; every other key goes to TrainingArguments.

    Args:
        data: Training text.
        alpha: Fraction of the original pretraining tokens, in (0, 1].
        original_tokens: What the model was pretrained on.
        original_steps, original_batch_tokens: The same, as steps and tokens per step.
        tokens: The budget itself, instead of `alpha`.
        text_column: Column of the text.
        window: Tokens per block.
        batch_tokens: Tokens per optimiser step over all processes.
        learning_rate, warmup_steps, lr_scheduler_type: The rate and its course.
        teacher: Model to distil from; `none` trains on cross-entropy.
        temperature, ce_weight: Of the distillation loss.
        teacher_top_k, teacher_cache: Ask the teacher once, and keep its likeliest tokens in a folder.
        train: Parameter set.
        lora_r, lora_alpha, lora_dropout: Adapter rank, scale and dropout.
        objective: `next-token` or `span-corruption`; absent follows the model type.
        dropout: Of the student; 0 where absent.
        eval_data: Held-out text scored during training.
        holdout: Fraction of `data` held out by document hash where there is no `eval_data`.
        eval_tokens: At most so many held-out tokens each time.
        data_weights: Share of the run of each entry of `data`.
        assistant_only_loss: In chats, only the assistant's tokens carry loss.
        streaming, isolate_documents: How the data is read and packed.
        seed, device, torch_compile: As on the command line.
        residual_dtype: Of the hidden states between layers under bf16.
        save_steps, save_total_limit, logging_steps, eval_steps, keep_checkpoints: Bookkeeping.
        training_args: Every other key of the section.
    """

    data: tuple[str, ...] = ()
    alpha: float | None = None
    original_tokens: int | None = None
    original_steps: int | None = None
    original_batch_tokens: int | None = None
    tokens: int | None = None
    text_column: str | None = None
    window: int | None = None
    batch_tokens: int | None = None
    learning_rate: float | None = None
    warmup_steps: float | None = None
    lr_scheduler_type: str | None = None
    teacher: str | None = None
    temperature: float | None = None
    ce_weight: float | None = None
    teacher_top_k: int | None = None
    teacher_cache: str | None = None
    train: Train | None = None
    lora_r: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    objective: Objective | None = None
    dropout: float | None = None
    eval_data: tuple[str, ...] = ()
    holdout: float | None = None
    eval_tokens: int | None = None
    data_weights: tuple[float, ...] | None = None
    assistant_only_loss: bool | None = None
    streaming: bool | None = None
    isolate_documents: bool | None = None
    seed: int | None = None
    device: str | None = None
    residual_dtype: Literal["float32", "bfloat16"] | None = None
    torch_compile: bool | None = None
    save_steps: float | None = None
    save_total_limit: int | None = None
    logging_steps: int | None = None
    eval_steps: int | None = None
    keep_checkpoints: bool | None = None
    training_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportRecipe(Section):
    """Section `report`: what is written beside the checkpoints.

    Args:
        title: Headline; made from source and G where absent.
        formats: Any of `json`, `markdown`, `html`, `card`.
        batch, context: The decoding situation that KV-cache sizes are quoted for.
        max_ppl_ratio: Quality gate: largest perplexity over the original's that still passes.
        license: Of the source, for the model card, where its own card does not say.
    """

    title: str | None = None
    formats: tuple[str, ...] = ("json", "markdown", "html", "card")
    batch: int = 1
    context: int = 4096
    max_ppl_ratio: float | None = None
    license: str | None = None


@dataclass(frozen=True)
class SweepRecipe(Section):
    """Section `sweep`: the grid; every other section holds what all its cells share.

    Args:
        groups: Values of G.
        methods: Values of `convert.method`.
        alphas: Uptraining fractions; 0 is the conversion alone.
        groupings: Values of `convert.grouping`; empty leaves the section's own.
        bench: Also time cached decoding of every cell, at the report's batch and context.
    """

    groups: tuple[int, ...] = ()
    methods: tuple[Method, ...] = ()
    alphas: tuple[float, ...] = (0.0,)
    groupings: tuple[str, ...] = ()
    bench: bool = False


@dataclass(frozen=True)
class Recipe:
    """A whole job: convert → evaluate → uptrain → evaluate → report.

    Args:
        source: Folder or hub id of the MHA model.
        output: Folder that receives checkpoints, results and report.
        description: One line for people.
        trust_remote_code: Consent to run code that comes with the model.
        convert, evaluate, uptrain, report, sweep: Sections; an absent `uptrain` ends after evaluation.
    """

    source: str = ""
    output: str = ""
    description: str = ""
    trust_remote_code: bool = False
    convert: ConvertRecipe = field(default_factory=ConvertRecipe)
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)
    uptrain: UptrainRecipe | None = None
    report: ReportRecipe = field(default_factory=ReportRecipe)
    sweep: SweepRecipe | None = None

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain YAML data: every value that is set."""
        return _plain(self)

    def to_yaml(self) -> str:
        """The effective recipe; reading it back gives an equal `Recipe`."""
        import yaml  # not at the top: `mha2gqa --help` reads this module

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, type] = {
    "convert": ConvertRecipe,
    "evaluate": EvaluateRecipe,
    "uptrain": UptrainRecipe,
    "report": ReportRecipe,
    "sweep": SweepRecipe,
}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        out: dict[str, Any] = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if f.name == "training_args":
                out |= {key: _plain(x) for key, x in item.items()}
            elif item is not None and item != ():
                out[yaml_name(f.name)] = _plain(item)
        return out
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return value
