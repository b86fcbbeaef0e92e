"""After merging: closed-form refit of the output projection, then regression, one layer at a time.

Both models are walked side by side, layer by layer, on the same calibration text; what is kept is one
hidden stream each, never all layers' activations, and nothing is ever back-propagated through the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .architectures import AttentionSite, AttentionSpec, find_sites
from .errors import DataError, UnsupportedModelError

Progress = Callable[["LayerFit"], None]


@dataclass(frozen=True)
class ReconstructConfig:
    """What to do to each layer after merging, and how hard to try.

    Args:
        refit: Closed-form ridge refit of the output projection.
        regress: Layer-local regression of all attention weights.
        ridge: Strength of the pull towards the merged weights, in mean diagonals of the moment.
        steps: Regression steps per layer.
        batch_size: Blocks per step.
        learning_rate: Peak rate of Adam; warm-up over 2 % of the steps, then linear to zero.
        unit: Whose output is fitted: the `attention` module's, or that of the whole decoder `layer`
            (its feed-forward part frozen), which weighs an error by what the layer makes of it.
        inputs: What the student's layer reads while it is fitted: the `student`'s own stream, so that it
            also repairs the drift of the layers before it, or the `teacher`'s.
        holdout: Share of the blocks kept aside: the best state on them wins.
        seed: Order of the blocks.
    """

    refit: bool = True
    regress: bool = True
    ridge: float = 1e-3
    steps: int = 1000
    batch_size: int = 16
    learning_rate: float = 3e-3
    unit: Literal["attention", "layer"] = "attention"
    inputs: Literal["student", "teacher"] = "student"
    holdout: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class LayerFit:
    """One layer before and after.

    Args:
        path: The attention module.
        before: Error of the attention output on held-out blocks, relative to the original's variance.
        refitted: The same after the closed-form refit (None: not made).
        after: The same at the end.
        steps: Regression steps made.
    """

    path: str
    before: float
    refitted: float | None
    after: float
    steps: int


@dataclass
class _Call:
    """How the model calls one module, hidden states aside; the same for every batch of full blocks."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def __call__(self, module: nn.Module, hidden: Tensor) -> Tensor:
        return _tensor(module(hidden, *self.args, **(self.kwargs or {})))


class _Stop(Exception):
    """Ends a forward pass once the first layer's input is known."""


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def reconstruct(
    teacher: Any,
    student: Any,
    spec: AttentionSpec,
    blocks: Tensor,
    config: ReconstructConfig | None = None,
    progress: Progress | None = None,
) -> list[LayerFit]:
    """Fit every attention module of `student` to what `teacher` computes; `student` changes in place.

    Args:
        teacher: The original model (of the student's class), left as it is.
        student: The merged model, same device.
        spec: Its architecture.
        blocks: Token ids `[N, T]` or `[N, T + 1]` (a last column of targets is ignored by fitting alike).
        config: What to do.
        progress: Called after each layer.

    Returns:
        One `LayerFit` per attention module.

    Raises:
        DataError: Fewer than two batches of blocks, or activations that are not finite.
        UnsupportedModelError: Layers are no plain chain (encoder-decoders).
    """
    config = config or ReconstructConfig()
    sites = {_layer_path(site): site for site in find_sites(spec, student.state_dict())}
    if len({kind for kind, _ in spec.modules}) > 1:
        raise UnsupportedModelError("layer-wise fitting works on decoder-only models", where="--reconstruct")
    with _frozen(teacher, student):
        walk = _Walk(teacher, student, spec, sites, blocks, config)
        fits = []
        for path in walk.layers:
            fit = walk.visit(path)
            if fit:
                fits.append(fit)
                if progress:
                    progress(fit)
    return fits


def _layer_path(site: AttentionSite) -> str:
    """Path of the decoder layer around a module: up to and with the layer index."""
    match = re.match(rf"(.*?\.)?{site.layer}(?=\.)", site.path)
    assert match is not None, site.path
    return match.group()


@contextmanager
def _frozen(teacher: nn.Module, student: nn.Module) -> Iterator[None]:
    """Both models in eval mode, no gradients but those asked for; restored afterwards."""
    state = [(p, p.requires_grad) for model in (teacher, student) for p in model.parameters()]
    modes = [(model, model.training) for model in (teacher, student)]
    for parameter, _ in state:
        parameter.requires_grad_(False)
    teacher.eval()
    student.eval()
    try:
        yield
    finally:
        for parameter, wanted in state:
            parameter.requires_grad_(wanted)
        for model, mode in modes:
            model.train(mode)


class _Walk:
    """Both models' hidden streams `[N, T, D]`, at the input of the layer to be visited next."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        spec: AttentionSpec,
        sites: dict[str, AttentionSite],
        blocks: Tensor,
        config: ReconstructConfig,
    ) -> None:
        self.teacher, self.student, self.spec, self.sites, self.config = teacher, student, spec, sites, config
        device = next(teacher.parameters()).device
        batches = len(blocks) // config.batch_size
        self.held = max(1, math.ceil(batches * config.holdout))
        if batches < self.held + 1:
            tokens = 2 * config.batch_size * blocks.shape[1]
            raise DataError(
                f"{blocks.numel()} tokens of calibration text do not fill two batches",
                where="--calibration",
                fix=f"give at least {tokens} tokens",
            )
        ids = blocks[: batches * config.batch_size].to(device)
        container = next(iter(sites)).rpartition(".")[0]
        self.layers = [f"{container}.{i}" for i in range(len(teacher.get_submodule(container)))]  # type: ignore[arg-type]
        self.calls = _capture_calls(teacher, self.layers, ids[: config.batch_size])
        stream = _first_inputs(teacher, teacher.get_submodule(self.layers[0]), ids, config.batch_size)
        self.streams = {"teacher": stream, "student": stream}

    @property
    def train_rows(self) -> int:
        return len(self.streams["teacher"]) - self.held * self.config.batch_size

    def visit(self, path: str) -> LayerFit | None:
        """Fit the layer at `path` if it has attention, then move both streams past it."""
        call, site = self.calls[path], self.sites.get(path)
        teacher, student = self.teacher.get_submodule(path), self.student.get_submodule(path)
        fit = None
        if site is None:
            outputs = self._run(teacher, call, "teacher")
        else:
            with _recorded(teacher, site, path, self.spec) as target:
                outputs = self._run(teacher, call, "teacher")
            if not torch.isfinite(outputs).all():
                raise DataError(
                    "activations are not finite", where=path, fix="load the model in bf16 or fp32"
                )
            fit = self._fit(path, site, student, call, target, outputs)
        self.streams["student"] = self._run(student, call, "student")
        self.streams["teacher"] = outputs
        return fit

    @torch.no_grad()
    def _run(self, layer: nn.Module, call: _Call, which: str, rows: slice = slice(None)) -> Tensor:
        parts = self.streams[which][rows].split(self.config.batch_size)
        return torch.cat([call(layer, part) for part in parts])

    def _fit(
        self, path: str, site: AttentionSite, layer: nn.Module, call: _Call, target: _Record, outputs: Tensor
    ) -> LayerFit:
        attention = layer.get_submodule(site.path[len(path) + 1 :])
        wanted = target.outputs()
        before = self._error(path, site, layer, call, wanted)
        refitted, steps, after = None, 0, before
        if self.config.refit:
            self._refit(path, site, layer, call, target.projected())
            after = refitted = self._error(path, site, layer, call, wanted)
        if self.config.regress and self.config.steps > 0:
            steps = self._regress(path, site, layer, attention, call, target, outputs)
            after = self._error(path, site, layer, call, wanted)
        return LayerFit(site.path, before, refitted, after, steps)

    def _error(self, path: str, site: AttentionSite, layer: nn.Module, call: _Call, wanted: Tensor) -> float:
        """Relative error of the attention output on held-out blocks, each model on its own stream."""
        rows = slice(self.train_rows, None)
        with _recorded(layer, site, path, self.spec) as seen:
            self._run(layer, call, "student", rows)
        wanted = wanted[rows].double()
        spread = (wanted - wanted.mean((0, 1))).square().sum().clamp_min(1e-30)
        return float((seen.outputs().double() - wanted).square().sum() / spread)

    def _refit(self, path: str, site: AttentionSite, layer: nn.Module, call: _Call, wanted: Tensor) -> None:
        """Ridge least squares of the output projection onto the original's, on the student's own inputs."""
        projection = layer.get_submodule(f"{site.path}.{self.spec.o}"[len(path) + 1 :])
        weight: Tensor = projection.weight  # type: ignore[assignment]
        bias: Tensor | None = getattr(projection, "bias", None)
        gram: Tensor | None = None
        cross: Tensor | None = None
        for start in range(0, self.train_rows, self.config.batch_size):
            rows = slice(start, start + self.config.batch_size)
            with _recorded(layer, site, path, self.spec) as seen:
                self._run(layer, call, "student", rows)
            z = seen.projection_inputs().flatten(0, 1).double()  # [tokens, H * e]
            if bias is not None:
                z = torch.cat([z, z.new_ones(len(z), 1)], 1)
            y = wanted[rows].flatten(0, 1).double()
            gram = z.T @ z if gram is None else gram + z.T @ z
            cross = z.T @ y if cross is None else cross + z.T @ y
        assert gram is not None and cross is not None
        merged = (weight if self.spec.transposed else weight.T).double()  # [H * e, D]
        if bias is not None:
            merged = torch.cat([merged, bias.double()[None]])
        strength = self.config.ridge * gram.diagonal().mean()
        if not strength > 0:  # a dead module projects nothing: nothing to fit
            return
        ridge = strength * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solved = torch.linalg.solve(gram + ridge, cross + strength * merged)
        if bias is not None:
            bias.data.copy_(solved[-1])
            solved = solved[:-1]
        weight.data.copy_(solved if self.spec.transposed else solved.T)

    def _regress(
        self,
        path: str,
        site: AttentionSite,
        layer: nn.Module,
        attention: nn.Module,
        call: _Call,
        target: _Record,
        outputs: Tensor,
    ) -> int:
        """Adam on the attention weights; returns the steps made. The best state on held-out blocks stays."""
        config = self.config
        unit: nn.Module
        if config.unit == "layer":
            unit, unit_call, wanted, inputs = layer, call, outputs, self.streams[config.inputs]
        else:
            seen = target
            if config.inputs == "student":
                with _recorded(layer, site, path, self.spec) as seen:
                    self._run(layer, call, "student")
            unit, unit_call, wanted, inputs = attention, seen.call, target.outputs(), seen.inputs()
        return _Regression(unit, attention, unit_call, inputs, wanted, self.train_rows, config).run()


class _Regression:
    """One unit's fit: inputs and wanted outputs `[N, T, D]`, the last rows held out."""

    def __init__(
        self,
        unit: nn.Module,
        attention: nn.Module,
        call: _Call,
        inputs: Tensor,
        wanted: Tensor,
        train_rows: int,
        config: ReconstructConfig,
    ) -> None:
        self.unit, self.attention, self.call, self.config = unit, attention, call, config
        self.inputs, self.wanted, self.train_rows = inputs, wanted, train_rows
        self.scale = 1 / wanted.float().var().clamp_min(1e-30)

    def run(self) -> int:
        """Fit; returns the steps made."""
        config, dtype = self.config, next(self.attention.parameters()).dtype
        self.unit.float()
        parameters = list(self.attention.parameters())
        for parameter in parameters:
            parameter.requires_grad_(True)
        adam = torch.optim.Adam(parameters, lr=config.learning_rate, betas=(0.9, 0.99))
        generator = torch.Generator().manual_seed(config.seed)
        best, state, stale, order, step = self._held_out(), self._state(), 0, torch.empty(0).long(), 0
        every = max(1, config.steps // 20)
        for step in range(1, config.steps + 1):
            if len(order) < config.batch_size:
                order = torch.randperm(self.train_rows, generator=generator)
            rows, order = order[: config.batch_size].to(self.inputs.device), order[config.batch_size :]
            for group in adam.param_groups:
                group["lr"] = config.learning_rate * _schedule(step, config.steps)
            loss = self._loss(self.inputs[rows], self.wanted[rows])
            loss.backward()
            adam.step()
            adam.zero_grad(set_to_none=True)
            if step % every == 0 or step == config.steps:
                held = self._held_out()
                if held < best:
                    best, state, stale = held, self._state(), 0
                else:
                    stale += 1
                if stale >= 6 or not math.isfinite(held):
                    break
        for parameter, value in zip(parameters, state, strict=True):
            parameter.data.copy_(value)
            parameter.requires_grad_(False)
        self.unit.to(dtype)
        return step

    def _state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.attention.parameters()]

    def _loss(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        with _autocast(inputs.device):
            made = self.call(self.unit, inputs.float())
        return (made.float() - wanted.float()).square().mean() * self.scale

    @torch.no_grad()
    def _held_out(self) -> float:
        rows = range(self.train_rows, len(self.inputs), self.config.batch_size)
        size = self.config.batch_size
        losses = [self._loss(self.inputs[i : i + size], self.wanted[i : i + size]) for i in rows]
        return float(torch.stack(losses).mean())


def _schedule(step: int, steps: int) -> float:
    """Share of the peak rate: linear up over 2 % of the steps, then linear down to zero."""
    warm = max(1, steps // 50)
    return min(step / warm, max(0.0, (steps - step + 1) / max(1, steps - warm)))


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class _Record:
    """What one attention module read and wrote, batch after batch."""

    def __init__(self) -> None:
        self.call = _Call()
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._projection_inputs: list[Tensor] = []
        self._projected: list[Tensor] = []

    def inputs(self) -> Tensor:
        """Normed hidden states the module read, `[N, T, D]`."""
        return torch.cat(self._inputs)

    def outputs(self) -> Tensor:
        """The module's output, `[N, T, D]`."""
        return torch.cat(self._outputs)

    def projection_inputs(self) -> Tensor:
        """Input of the output projection, `[N, T, H * e]`."""
        return torch.cat(self._projection_inputs)

    def projected(self) -> Tensor:
        """Output of the output projection, `[N, T, D]`."""
        return torch.cat(self._projected)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        self.call = _Call(rest, kwargs)
        self._inputs.append(hidden.detach())

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._outputs.append(_tensor(output).detach())

    def after_projection(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._projection_inputs.append(args[0].detach())
        self._projected.append(output.detach())


@contextmanager
def _recorded(layer: nn.Module, site: AttentionSite, path: str, spec: AttentionSpec) -> Iterator[_Record]:
    """Record the attention module of `layer` (at `path`) while the block runs."""
    record = _Record()
    attention = layer.get_submodule(site.path[len(path) + 1 :])
    hooks = [
        attention.register_forward_pre_hook(record.before, with_kwargs=True),
        attention.register_forward_hook(record.after),
        attention.get_submodule(spec.o).register_forward_hook(record.after_projection),
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _capture_calls(model: Any, layers: Sequence[str], ids: Tensor) -> dict[str, _Call]:
    """How the model calls each of its layers on a batch of full blocks."""
    calls: dict[str, _Call] = {}
    hooks = []
    for path in layers:

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
            kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            calls[path] = _Call(args[1:], kwargs)

        hooks.append(model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@torch.no_grad()
def _first_inputs(model: Any, layer: nn.Module, ids: Tensor, batch_size: int) -> Tensor:
    """Hidden states at the first layer, `[N, T, D]`."""
    parts: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts.append(args[0] if args else kwargs["hidden_states"])
        raise _Stop

    hook = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        for part in ids.split(batch_size):
            try:
                model(input_ids=part, use_cache=False)
            except _Stop:
                continue
    finally:
        hook.remove()
    return torch.cat(parts)
