"""The stages after merging, for a whole model: both models are walked side by side, block by block."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import AttentionModule, AttentionSpec, find_attention_modules
from ..calibration import Batch, module_key
from ..config.reconstruct import ReconstructConfig
from ..errors import DataError
from .fisher import fisher_metrics
from .hidden_states import Stream, gather, slice_rows
from .refit import delivered, refit, undrifted
from .regress import regress
from .train_state import float32, frozen, repeatable, trained_parameters

Progress = Callable[["LayerFit"], None]


@dataclass(frozen=True)
class LayerFit:
    """One attention module before and after.

    Args:
        path: The module in the student.
        before: Error of its output on held-out blocks, relative to the original's variance, each model on
            its own stream.
        refitted: The same after the closed-form refit (None: not made).
        after: The same at the end.
        steps: Regression steps made.
        ridge: Pull of the refit that held-out blocks chose (None: not made, or the merged projection was best).
    """

    path: str
    before: float
    refitted: float | None
    after: float
    steps: int
    ridge: float | None = None


@dataclass(frozen=True)
class _Pair:
    """One module in both models, by path."""

    module: AttentionModule
    teacher: AttentionModule


def reconstruct(
    teacher: Any,
    student: Any,
    spec: AttentionSpec,
    inputs: Batch | Tensor,
    config: ReconstructConfig | None = None,
    progress: Progress | None = None,
    *,
    student_spec: AttentionSpec | None = None,
    only: Collection[str] | None = None,
) -> list[LayerFit]:
    """Fit every attention module of `student` to what `teacher` computes; `student` changes in place.

    Args:
        teacher: The original model, left as it is.
        student: The merged model, on the same device.
        spec: The original's architecture.
        inputs: Token ids `[N, T]`, or keyword tensors of both models' forward with N rows each.
        config: Which stages, and how hard.
        progress: Called after each module.
        student_spec: The student's architecture, where it is another.
        only: Keys (`module_key`) of the modules to fit; the others stay as they are. None fits all.

    Returns:
        One entry per module, in the order they were fitted.

    Raises:
        DataError: Fewer than two batches of blocks, or activations that are not finite.

    Example:
        >>> fits = reconstruct(teacher, student, spec, blocks[:, :-1])  # doctest: +SKIP
    """
    config = (config or ReconstructConfig()).for_window(window_of(inputs))
    train, held_out = split_batches(inputs, config)
    inputs = slice_rows(inputs, held_out.stop * config.batch_size)
    pairs = _pairs(teacher, student, spec, student_spec or spec)
    pairs = [pair for pair in pairs if only is None or module_key(pair.module) in only]
    if not pairs:
        return []
    fits = []
    with frozen(teacher, student), repeatable():
        size = config.batch_size
        walk = _Walk(
            Stream(student, inputs, size, _blocks(student, [pair.module for pair in pairs])),
            Stream(teacher, inputs, size, _blocks(teacher, [pair.teacher for pair in pairs])),
            (spec, student_spec or spec),
            (train, held_out),
            config,
        )
        if config.regress and config.weighting == "fisher":
            walk.metrics = fisher_metrics(teacher, walk.teacher.batches, walk.teacher.blocks, config.seed)
        last = len(walk.student.blocks) - 1
        for i, block in enumerate(walk.student.blocks):
            for pair in pairs:
                if pair.module.path.startswith(f"{block}."):
                    fits.append(walk.visit(pair))
                    if progress:
                        progress(fits[-1])
            if i < last:
                walk.student.advance()
                walk.teacher.advance()
    return fits


def window_of(inputs: Batch | Tensor) -> int:
    """Tokens of a block (of an encoder-decoder: those the encoder reads)."""
    rows = inputs if isinstance(inputs, Tensor) else inputs.get("input_ids", next(iter(inputs.values())))
    return rows.shape[1]


def split_batches(inputs: Batch | Tensor, config: ReconstructConfig) -> tuple[range, range]:
    """Batches to fit and batches to judge by: the last ones.

    Raises:
        DataError: There are fewer than two batches of blocks.
    """
    rows = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    whole = len(rows) // config.batch_size
    if whole < 2:
        raise DataError(
            f"{len(rows)} blocks of {rows.shape[1]} tokens, two batches of {config.batch_size} are needed",
            where="--calibration",
            fix="give more text, or --no-refit --no-reconstruct",
        )
    held = max(1, round(whole * config.holdout))
    return range(whole - held), range(whole - held, whole)


def _pairs(
    teacher: nn.Module, student: nn.Module, spec: AttentionSpec, student_spec: AttentionSpec
) -> list[_Pair]:
    original = {
        module_key(module): module for module in find_attention_modules(spec, teacher.state_dict().keys())
    }
    modules = find_attention_modules(student_spec, student.state_dict().keys())
    # In a layer, cross-attention comes after self-attention and sees what that made.
    modules = sorted(modules, key=lambda s: (s.layer, s.kind != "self"))
    return [
        _Pair(module, original[module_key(module)]) for module in modules if module_key(module) in original
    ]


def _blocks(model: nn.Module, modules: list[AttentionModule]) -> list[str]:
    """Paths of all blocks of the stack that holds `modules`, those without attention included."""
    module = modules[0]
    match = re.match(rf"(?:.*?\.)?(?={module.layer}\.)", module.path)
    assert match is not None, module.path
    container = match.group().removesuffix(".")
    return [f"{container}.{name}" for name, _ in model.get_submodule(container).named_children()]


@dataclass
class _Walk:
    """Both models at the input of the same block.

    Args:
        student, teacher: Their streams.
        specs: Of the teacher and of the student.
        split: Batches to fit, and to judge by.
        config: What to do.
        metrics: What an error in a block's output counts, by block; empty: all alike.
    """

    student: Stream
    teacher: Stream
    specs: tuple[AttentionSpec, AttentionSpec]
    split: tuple[range, range]
    config: ReconstructConfig
    metrics: list[Tensor] = field(default_factory=list)

    def visit(self, pair: _Pair) -> LayerFit:
        """Fit one module of the current block."""
        before = self.error(pair)
        if before != before:
            raise DataError(
                "activations are not finite",
                where=pair.module.path,
                fix="load the model in bfloat16 or float32",
            )
        fit = LayerFit(pair.module.path, before, None, before, 0)
        if self.config.refit:
            ridge = self._refit(pair)
            refitted = self.error(pair)
            fit = replace(fit, refitted=refitted, after=refitted, ridge=ridge)
        if self.config.regress and self.config.steps:
            steps = self._regress(pair)
            fit = replace(fit, after=self.error(pair), steps=steps)
        return fit

    def error(self, pair: _Pair) -> float:
        """Squared error of the attention output over the original's variance, on held-out batches."""
        mine = self.student.model.get_submodule(pair.module.path)
        original = self.teacher.model.get_submodule(pair.teacher.path)
        made, wanted = [], []
        for i in self.split[1]:
            x, y = self.student.call(mine, i).output, self.teacher.call(original, i).output
            assert x is not None and y is not None
            made.append(x.flatten(0, -2).double())
            wanted.append(y.flatten(0, -2).double())
        y = torch.cat(wanted)
        spread = (y - y.mean(0)).square().sum().clamp_min(1e-300)
        return float((torch.cat(made) - y).square().sum() / spread)

    def _refit(self, pair: _Pair) -> float | None:
        """Closed-form refits; returns the pull chosen for the output projection."""
        spec, own = self.specs

        def solve(module: nn.Module, wanted: Callable[[int], Tensor]) -> float | None:
            ridge = self.config.ridge
            return refit(self.student, module, wanted, self.split, transposed=own.transposed, ridge=ridge)

        if self.config.refit_inputs:
            for mine, original in self._input_projections(pair):
                solve(mine, undrifted(self.teacher, original, mine))
        mine = self.student.model.get_submodule(f"{pair.module.path}.{own.o}")
        original = self.teacher.model.get_submodule(f"{pair.teacher.path}.{spec.o}")
        return solve(mine, delivered(self.teacher, original))

    def _input_projections(self, pair: _Pair) -> list[tuple[nn.Module, nn.Module]]:
        """Student's projections of queries, keys and values, each with one of the original that reads the same."""

        def projections(model: nn.Module, module: AttentionModule) -> dict[str, nn.Module]:
            names = {
                role.split(".")[0]: name for role, name in module.names.items() if role.endswith(".weight")
            }
            return {
                role: model.get_submodule(name.removesuffix(".weight"))
                for role, name in names.items()
                if role in ("q", "k", "v", "qkv", "kv")
            }

        theirs = projections(self.teacher.model, pair.teacher)
        mine = projections(self.student.model, pair.module)
        return [(m, theirs.get(role) or next(iter(theirs.values()))) for role, m in mine.items()]

    def _regress(self, pair: _Pair) -> int:
        """Regression in float32, cast back at the end; returns the steps made."""
        attention = self.student.model.get_submodule(pair.module.path)
        module, target = attention, self.teacher.model.get_submodule(pair.teacher.path)
        if self.config.unit == "layer":
            module, target = self.student.block, self.teacher.block
        own = self.config.inputs == "student"
        metric = self.metrics[self.student.at] if self.metrics else None
        train, held_out = (
            gather(self.student, module, self.teacher, target, own, which, metric) for which in self.split
        )
        parameters = trained_parameters(attention, pair.module)
        with float32(parameters), torch.enable_grad():
            return regress(module, parameters, train, held_out, self.config)
