"""Fitting after merging, one attention module at a time: closed-form refit, then regression."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import AttentionModule, AttentionSpec, find_attention_modules
from ..calibration import Batch, module_key
from ..config.reconstruct import ReconstructConfig
from ..errors import DataError
from .calls import Calls, gather, slice_rows
from .hidden_states import Stream
from .module_calls import block_paths
from .ranks import Ranks
from .refit import refit
from .regress import regress, variance
from .row_store import RowStore
from .train_state import float32, frozen, repeatable, rest_of_block, trained_parameters

Report = Callable[["LayerFit"], None]
# A copy of heads rounded to float16 is below it; what real merging loses is a thousand times that.
EXACT = 1e-6


@dataclass(frozen=True)
class LayerFit:
    """One attention module before and after.

    Args:
        path: The module in the student.
        before: Error of its output on the validation batches (of its layer's where all of that is trained),
            relative to the original's variance, each model on its own stream.
        refitted: The same after the closed-form refit (None: not made).
        after: The same at the end.
        steps: Regression steps made.
        ridge: Ridge of the refit (None: not made, or the merged projection was best).
    """

    path: str
    before: float
    refitted: float | None
    after: float
    steps: int
    ridge: float | None = None


@dataclass(frozen=True)
class Pair:
    """One attention module in both models, by path."""

    module: AttentionModule
    teacher: AttentionModule


def reconstruct(
    teacher: Any,
    student: Any,
    spec: AttentionSpec,
    inputs: Batch | Tensor,
    config: ReconstructConfig | None = None,
    progress: Report | None = None,
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
    split = split_batches(inputs, config)
    inputs = slice_rows(inputs, split[1].stop * config.batch_size)
    pairs = find_pairs(teacher, student, spec, student_spec or spec)
    pairs = [pair for pair in pairs if only is None or module_key(pair.module) in only]
    if not pairs:
        return []
    fits = []
    with frozen(teacher, student), repeatable():
        blocks, originals = (
            block_paths(model, module)
            for model, module in ((student, pairs[0].module), (teacher, pairs[0].teacher))
        )
        original = Stream(teacher, inputs, config.batch_size, originals)
        own = Stream(student, inputs, config.batch_size, blocks)
        fitter = Fitter(own, original, (spec, student_spec or spec), split, config)
        for i, block in enumerate(blocks):
            fitter.enter()
            for fit in fitter.visit([pair for pair in pairs if pair.module.path.startswith(f"{block}.")]):
                fits.append(fit)
                if progress:
                    progress(fit)
            if i + 1 < len(blocks):
                fitter.leave()
    return fits


def window_of(inputs: Batch | Tensor) -> int:
    """Tokens of a block (of an encoder-decoder: those the encoder reads)."""
    rows = inputs if isinstance(inputs, Tensor) else inputs.get("input_ids", next(iter(inputs.values())))
    return rows.shape[1]


def split_batches(inputs: Batch | Tensor, config: ReconstructConfig) -> tuple[range, range]:
    """Batches to fit, and batches to validate on: the last ones.

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


def find_pairs(
    teacher: nn.Module, student: nn.Module, spec: AttentionSpec, student_spec: AttentionSpec
) -> list[Pair]:
    """The attention modules of both models, in the order in which they are run."""
    original = {module_key(m): m for m in find_attention_modules(spec, teacher.state_dict().keys())}
    modules = find_attention_modules(student_spec, student.state_dict().keys())
    # In a layer, cross-attention comes after self-attention and sees what that made.
    modules = sorted(modules, key=lambda m: (m.layer, m.kind != "self"))
    return [Pair(m, original[module_key(m)]) for m in modules if module_key(m) in original]


class Fitter:
    """Both models at the input of the same block.

    Args:
        student, teacher: Their streams.
        specs: Of the teacher and of the student.
        split: Batches to fit, and to validate on.
        config: What to do.
        ranks: Who shares the rows; this process alone by default.
    """

    def __init__(
        self,
        student: Stream,
        teacher: Stream,
        specs: tuple[AttentionSpec, AttentionSpec],
        split: tuple[range, range],
        config: ReconstructConfig,
        ranks: Ranks | None = None,
    ) -> None:
        self.student, self.teacher, self.specs, self.split = student, teacher, specs, split
        self.config, self.ranks = config, ranks or Ranks()
        self._outputs: RowStore | None = None
        self._spare: RowStore | None = None

    @property
    def outputs(self) -> RowStore | None:
        """What the original's block returns, where `enter` has computed it and the next block reads just that."""
        return self._outputs if self.teacher.chained else None

    def enter(self) -> None:
        """Compute what the original's block returns, where blocks are fitted to that."""
        self._outputs = None
        if self.config.regress and self.config.steps and self.config.unit == "layer":
            self._outputs = self.teacher.outputs(self._spare)

    def leave(self) -> None:
        """Move both models past the block."""
        self.student.advance()
        if self._outputs is None or not self.teacher.chained:
            self.teacher.advance()
        else:
            self._spare = next(iter(self.teacher.rows.values()))
            self.teacher.advance(self._outputs)

    def visit(self, pairs: Sequence[Pair]) -> list[LayerFit]:
        """Fit the modules of the current block, in the order in which they are run.

        Raises:
            DataError: Activations are not finite.
        """
        if pairs and self.config.trains_layer:
            return self._fit(pairs, self.student.block, self.teacher.block)
        fits = []
        for pair in pairs:
            mine = self.student.model.get_submodule(pair.module.path)
            original = self.teacher.model.get_submodule(pair.teacher.path)
            fits += self._fit([pair], mine, original)
        return fits

    def _fit(self, pairs: Sequence[Pair], mine: nn.Module, original: nn.Module) -> list[LayerFit]:
        """Refit modules one by one, then train them together.

        Args:
            pairs: The modules.
            mine, original: Of student and teacher, whose outputs the errors compare.
        """
        wanted = [_output(self.teacher, original, i) for i in self.split[1]]
        before = self._error(mine, wanted)
        if not math.isfinite(before):
            raise DataError(
                "activations are not finite",
                where=pairs[0].module.path,
                fix="load the model in bfloat16 or float32",
            )
        if before <= exact(mine):  # fits would fit noise
            return [LayerFit(pair.module.path, before, None, before, 0) for pair in pairs]
        fits: list[LayerFit] = []
        for pair in pairs:
            fits.append(self._refitted(pair, mine, wanted, fits[-1].after if fits else before))
        if self.config.regress and self.config.steps:
            steps = self._regress(pairs)
            after = self._error(mine, wanted)
            fits = [replace(fit, after=after, steps=steps) for fit in fits]
        return fits

    def _refitted(self, pair: Pair, mine: nn.Module, wanted: Sequence[Tensor], before: float) -> LayerFit:
        """One module after the closed-form refit; `before` is the error without it."""
        fit = LayerFit(pair.module.path, before, None, before, 0)
        if self.config.refit:
            ridge = self._refit(pair)
            refitted = self._error(mine, wanted)
            fit = replace(fit, refitted=refitted, after=refitted, ridge=ridge)
        return fit

    def _error(self, mine: nn.Module, wanted: Sequence[Tensor]) -> float:
        """Squared error of a module's output over the original's variance, on the validation batches."""
        mean, squares, error, count = 0.0 * wanted[0][0, 0].double(), 0.0, 0.0, 0
        for i, y in zip(self.split[1], wanted, strict=True):
            x, flat = (self.student.real_rows(i, z).double() for z in (_output(self.student, mine, i), y))
            error += float((x - flat).square().sum())
            mean, squares, count = mean + flat.sum(0), squares + float(flat.square().sum()), count + len(flat)
        sums = self.ranks.sum(torch.tensor([error, squares, count], dtype=torch.float64, device=mean.device))
        mean = self.ranks.sum(mean) / sums[2]
        spread = float(sums[1] - sums[2] * mean.square().sum())
        return float(sums[0]) / max(spread, 1e-300)

    def _refit(self, pair: Pair) -> float | None:
        """Closed-form refit of the output projection; returns the ridge that was chosen."""
        spec, own = self.specs
        mine = self.student.model.get_submodule(f"{pair.module.path}.{own.o}")
        original = self.teacher.model.get_submodule(f"{pair.teacher.path}.{spec.o}")
        return refit(
            self.student,
            mine,
            lambda i: _output(self.teacher, original, i),
            self.split,
            transposed=own.transposed,
            ridge=self.config.ridge,
            ranks=self.ranks,
        )

    def _regress(self, pairs: Sequence[Pair]) -> int:
        """Regression in float32, cast back at the end; returns the steps made."""
        model = self.student.model
        module, calls = self._calls(pairs[0])
        train, validation = (
            replace(calls, span=range(r.start * calls.size, r.stop * calls.size)) for r in self.split
        )
        for part in (train, validation):
            part.scale = variance(part, self.ranks) or 1.0
        modules = [pair.module for pair in pairs]
        parameters = [p for m in modules for p in trained_parameters(model.get_submodule(m.path), m)]
        rest: list[nn.Parameter] = []
        if self.config.trains_layer:
            path = self.student.blocks[self.student.at]
            rest = list(rest_of_block(model, path, self.specs[1], modules).values())
        with float32([*parameters, *rest]), torch.enable_grad():
            return regress(module, parameters, train, validation, self.config, self.ranks, rest)

    def _calls(self, pair: Pair) -> tuple[nn.Module, Calls]:
        """What is run in the regression, and its inputs and targets on every row."""
        source = self.student if self.config.inputs == "student" else self.teacher
        if self.config.unit == "attention":
            attention = self.student.model.get_submodule(pair.module.path)
            original = self.teacher.model.get_submodule(pair.teacher.path)
            read = attention if source is self.student else original
            calls = gather(
                source, read, lambda i: _output(self.teacher, original, i), self.student, attention
            )
            return attention, calls
        assert self._outputs is not None
        if not self.student.chained:
            block, outputs = self.student.block, self._outputs
            read = block if source is self.student else self.teacher.block
            return block, gather(source, read, lambda i: outputs.read(source.rows_of(i)), self.student, block)
        names = list(self.student.rows)  # parameter names may differ between the two classes
        rows = dict(zip(names, source.rows.values(), strict=True))
        count = len(self._outputs)
        fixed, masked = self.student.fixed, self.student.masked
        calls = Calls(rows, self._outputs, range(count), fixed, self.student.size, masked, self.student.real)
        return self.student.block, calls


def exact(module: nn.Module) -> float:
    """The relative error at which a merged module counts as the original: a millionth, or what its dtype rounds."""
    eps = max((torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point()), default=0.0)
    return max(EXACT, eps**2)


def _output(stream: Stream, module: nn.Module, i: int) -> Tensor:
    """What a module of the current block returns on a batch."""
    output = stream.call(module, i).output
    assert output is not None
    return output
