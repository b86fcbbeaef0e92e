"""The decode step that a server runs: one token a sequence on a full cache, timed.

The cache has one fixed slot a token and every slot is used, so that no mask is needed and the step is the same
graph every time. Attention reads the shared heads as they are: the queries of a group attend as one head's
queries, and keys and values are never repeated. On a GPU the step is replayed as one CUDA graph, and its layers run in
the fastest of several ways (`step_variants`): compiled, projections merged, as servers do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface

from ..errors import first_line
from ..kv_cache import kv_layers
from ..uptraining.model_prep import compile_layers, repeated_layers, undo_compile
from .fixed_cache import BACKENDS, NAME, FixedCache, Kernel, LayerCache, NotServed, attend, fastest
from .merged import Shared, merge_projections, undo_merge
from .step_times import WARM_UP, DecodeTimes, wait
from .step_variants import Variant, agree, variants

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED = 8  # steps that tell whether compiled layers are faster


class FixedStep:
    """The decode step of a model at one batch and context.

    Args:
        model: In eval mode, on its device; its attention implementation is restored by `close`.
        config: Raw config.
        batch, context: Sequences; tokens that the step attends to, the new one included.
        compiled: Whether to compile the layers; None for yes on a GPU.

    Raises:
        NotServed: The model's attention is of another kind, or keeps another kind of state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Mapping[str, Any],
        batch: int,
        context: int,
        compiled: bool | None = None,
    ) -> None:
        if context < 2:
            raise NotServed("a context of one token has no prompt")
        self.model, self.warnings = model, []  # type: tuple[PreTrainedModel, list[str]]
        self.before = model.config._attn_implementation
        layers = repeated_layers(model)
        if len(kv_layers(config)) != len(layers):
            raise NotServed("not every layer keeps keys and values of its own")
        self.device = model.device
        like = next(model.get_input_embeddings().parameters())
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self.cache = FixedCache(config, batch, context, like)
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
        self.prompt = torch.randint(vocabulary, (1, context - 1), generator=generator).to(self.device)
        self.token = self.prompt[:, :1].expand(batch, 1).clone()
        self.position = torch.full((batch, 1), context - 1, device=self.device)
        self.kernel, self.kernels = Kernel(), {}  # type: tuple[Kernel, dict[str, float]]
        self.variant, self.seconds = Variant(), {}  # type: tuple[Variant, dict[str, float]]
        self.hooks: list[Any] = []
        self.merged: list[Shared] = []
        self.runs: list[Any] = []
        self.weights: list[Tensor] = []
        self.indices: dict[nn.Module, Any] = {}
        self.replay: Callable[[], None] = self.step
        self.graph: torch.cuda.CUDAGraph | None = None
        named = "cache" in signature(type(model).forward).parameters  # its older name is deprecated
        self.keys_and_values = {"cache" if named else "past_key_values": self.cache, "use_cache": True}

    def step(self) -> None:
        """One token for every sequence, into `token`; the cache stays as long as it is."""
        out = self.model(input_ids=self.token, position_ids=self.position, **self.keys_and_values)
        self.logits = out.logits
        self.token.copy_(self.logits[:, -1:].argmax(-1))

    def prefill(self) -> float:
        """Fill the cache by a prompt of one sequence, copied to the others; wall seconds to its first token."""
        self.cache.seen = 0
        wait(self.device)
        began = time.perf_counter()
        out = self.model(input_ids=self.prompt, logits_to_keep=1, **self.keys_and_values)
        self.token.copy_(out.logits[:, -1:].argmax(-1).expand_as(self.token))
        wait(self.device)
        self.cache.seen = self.cache.context - 1
        return time.perf_counter() - began

    def prepare(self) -> None:
        """Choose the kernel and the way the layers run, and capture the step, where that is asked for and possible."""
        heads = int(self.model.config.get_text_config().num_attention_heads)
        most = max(self.cache.parts, key=lambda part: part.key.shape[2])
        self.kernel, self.kernels = fastest(most, heads)
        with sdpa_kernel(self.kernel.backends), _settled_frequencies(self.model):
            self._choose(variants(self.device, self.compiled))

    def _choose(self, tried: list[Variant]) -> None:
        """Run the layers in the fastest of some ways; one that does not run, or computes something else, is said."""
        reference: Tensor | None = None
        best: tuple[float, Any] = (float("inf"), None)
        for variant in tried:
            if not self._become(variant):
                continue
            self._capture()
            if len(tried) == 1:
                return
            seconds, logits = self.time(TRIED), self._logits()
            reference = logits if reference is None else reference
            if not agree(logits, reference):
                self.warnings.append(f"{variant}: not taken, its logits are others")
                continue
            self.seconds[str(variant)] = seconds
            if seconds < best[0]:
                # The next way may replace the weights: a graph reads those that it was captured with.
                weights = [p.data for p in self.model.parameters()]
                best = (seconds, (variant, self.replay, self.graph, self.runs, weights))
        if best[1] is None:
            self._become(Variant())
            self._capture()
            return
        self.variant, self.replay, self.graph, self.runs, self.weights = best[1]
        if self.graph is None:  # what runs is the model itself, which is the last variant now
            self._become(self.variant)

    def _become(self, variant: Variant) -> bool:
        """Let the layers run in a way; False, and a warning, where they do not."""
        self._undo()
        self.variant, self.replay, self.graph = variant, self.step, None
        if variant == Variant():
            return True
        try:
            for layer in repeated_layers(self.model) if variant.merged else ():
                self.merged += merge_projections(layer)
            if variant.compiled:
                self._compile()
            self.step()
        except Exception as error:  # torch.compile raises many kinds; the step runs otherwise, and says so
            name = "layers" if variant == Variant(True) else f"{variant}:"
            self.warnings.append(f"{name} not compiled: {first_line(error)}")
            self._undo()
            return False
        return True

    def _logits(self) -> Tensor:
        """What a step from a fixed token gives."""
        self.token.copy_(self.prompt[:, :1].expand_as(self.token))
        self.replay()
        wait(self.device)
        return self.logits.clone()

    def time(self, steps: int) -> float:
        """Median wall seconds of a step."""
        times = []
        for _ in range(WARM_UP + steps):
            wait(self.device)
            began = time.perf_counter()
            self.replay()
            wait(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[WARM_UP:])

    def measure(self, steps: int) -> float:
        """`time`, with the kernel that was chosen."""
        with sdpa_kernel(self.kernel.backends), _settled_frequencies(self.model):
            return self.time(steps)

    @property
    def graphed(self) -> bool:
        """Whether the step is a CUDA graph."""
        return self.graph is not None

    def close(self) -> None:
        """Give the model its own attention and layers back."""
        self._undo()
        self.model.set_attn_implementation(self.before)

    def _undo(self) -> None:
        """Give the layers their own forward and numbers back."""
        for hook in self.hooks:
            hook.remove()
        undo_compile(self.model)
        undo_merge(self.merged)
        for module, index in self.indices.items():
            module.layer_idx = index  # type: ignore[assignment]
        self.hooks, self.merged, self.indices = [], [], {}

    def _compile(self) -> None:
        """One program for all layers: each gets the part of the cache that is its own, under one number."""
        layers = repeated_layers(self.model)
        for layer, part in zip(layers, self.cache.parts, strict=True):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    self.indices[module], module.layer_idx = module.layer_idx, 0  # type: ignore[assignment]
            self.hooks.append(
                layer.register_forward_pre_hook(_with_own_part(self.cache, part), with_kwargs=True)
            )
        torch._dynamo.reset()
        compile_layers(self.model)
        self.runs = [layer.forward for layer in layers]  # a graph replays their kernels

    def _capture(self) -> None:
        """Make the step one CUDA graph, on a GPU."""
        if self.device.type != "cuda":
            return
        self.replay, self.graph = self.step, None
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as error:
            wait(self.device)
            self.warnings.append(f"no CUDA graph: {first_line(error)}")
            return
        self.replay, self.graph = graph.replay, graph


@contextmanager
def _settled_frequencies(model: nn.Module) -> Iterator[None]:
    """Inside, rotary frequencies that depend on the length of the text stay those of the last pass.

    They would be looked up again in every step, and a CUDA graph cannot wait for the GPU to say how long the text is.
    """
    found: dict[Any, Any] = {m: m.rope_type for m in model.modules() if hasattr(m, "rope_type")}
    for module, kind in found.items():
        module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    try:
        yield
    finally:
        for module, kind in found.items():
            module.rope_type = kind


def _with_own_part(cache: FixedCache, part: LayerCache) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: part if x is cache else x for name, x in kwargs.items()}

    return hook


@contextmanager
def _ours(step: FixedStep) -> Iterator[None]:
    """Run the model with `attend`, on kernels that do not plan by length."""
    try:
        step.model.set_attn_implementation(NAME)
        with sdpa_kernel(BACKENDS):
            yield
    finally:
        step.close()


@torch.inference_mode()
def fixed_step(
    model: PreTrainedModel,
    config: Mapping[str, Any],
    batch: int,
    context: int,
    steps: int,
    compiled: bool | None = None,
) -> DecodeTimes:
    """Time the step that servers run.

    Args:
        model: In eval mode, on its device.
        config: Its raw config.
        batch, context: Sequences; tokens that a step attends to, the new one included.
        steps: How many are timed.
        compiled: Whether the layers are compiled; None for yes on a GPU.

    Raises:
        NotServed: This model's attention is of another kind.
    """
    step = FixedStep(model, config, batch, context, compiled)
    with _ours(step):
        try:
            with counted_attention() as calls:
                first = step.prefill()
            if calls[0] < len(step.cache.parts):
                raise NotServed("its class does not use transformers' attention interface")
            first = min(first, step.prefill())  # the first time kernels are chosen and memory is found
            step.prepare()
            seconds = step.measure(steps)
        except (TypeError, AttributeError, ValueError) as error:  # a class with a cache protocol of its own
            raise NotServed(first_line(error)) from error
    how = ["fixed cache, no mask"]
    how += [str(step.variant)] if step.variant.compiled else []
    how += ["CUDA graph"] if step.graphed else []
    return DecodeTimes(
        seconds=seconds,
        first_token_seconds=first,
        context=context,
        path=", ".join(how),
        attention=f"sdpa, {step.kernel}",
        native_gqa=True,
        cuda_graph=step.graphed,
        compiled=step.variant.compiled,
        warnings=tuple(dict.fromkeys(step.warnings)),
        kernels=step.kernels,
        variants=step.seconds,
    )


@contextmanager
def counted_attention() -> Iterator[list[int]]:
    """How often `attend` is called inside (before layers are compiled)."""
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return attend(*args, **kwargs)

    AttentionInterface.register(NAME, counted)
    try:
        yield calls
    finally:
        AttentionInterface.register(NAME, attend)
