"""What the attention of a model sees on text: one pass, streaming float64 moments, no activation kept.

For each attention module, with x̂ = [x; 1] the input of keys and values: E[x̂ x̂ᵀ], where a token counts
half for being there and half for the attention it receives; the same of the attention-averaged input x̃_h = Σ_t a_h,t x̂_t, summed over heads without forming it per head
(Σ_h (P_h X)ᵀ(P_h X) = Xᵀ (Σ_h P_hᵀ P_h) X); and E[q qᵀ] of the queries as attention uses them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .architectures import AttentionSite, AttentionSpec, find_sites
from .errors import CheckpointError, DataError, UsageError

IMPLEMENTATION = "mha2gqa_observed"  # the name our attention function is registered under
SCORE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}  # attention scores of one batch take about this much
Batch = Mapping[str, Tensor]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SiteStatistics:
    """Moments of one attention module; float64, n = D + 1.

    Args:
        inputs: `[n, n]` second moment of [x; 1], what keys and values are made of; a token weighs
            (1 + attention received from a query, relative to the mean) / 2.
        mixed: `[n, n]` mean over heads of the second moment of the attention-averaged [x; 1]; None where
            the model's class does not let its attention be observed.
        queries: `[H, d, d]` second moment of each head's queries (a rotation of RoPE planes keeps plane
            energies); None where not observed.
        tokens: How many tokens were seen.
        cross: Keys and values come from another sequence than queries.
    """

    inputs: Tensor
    mixed: Tensor | None
    queries: Tensor | None
    tokens: int
    cross: bool = False

    @property
    def query_inputs(self) -> Tensor | None:
        """Second moment of what queries are made of, where it is known."""
        return None if self.cross else self.inputs


@dataclass(frozen=True)
class Statistics:
    """Moments of every attention module of a model.

    Args:
        sites: By `site_key`: `self.3`, `cross.0`.
        about: What they were measured on: `tokens`, `window`, `data_sha256`, `model`, `notes`.
    """

    sites: Mapping[str, SiteStatistics]
    about: dict[str, Any] = field(default_factory=dict)

    def of(self, site: AttentionSite) -> SiteStatistics:
        """The moments of one module.

        Raises:
            UsageError: These statistics have none for it.
        """
        try:
            return self.sites[site_key(site)]
        except KeyError:
            raise UsageError(
                f"no statistics for {site.path}", where="--statistics", fix="they belong to another model"
            ) from None

    def save(self, path: str | Path) -> Path:
        """Write as safetensors (symmetric matrices as triangles), metadata inside."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        flags = {}
        for key, site in self.sites.items():
            flags[key] = {"tokens": site.tokens, "cross": site.cross}
            for name in ("inputs", "mixed", "queries"):
                x = getattr(site, name)
                if x is not None:
                    tensors[f"{key}.{name}"] = _packed(x.cpu())
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"mha2gqa": json.dumps({"schema_version": 1, "about": self.about, "sites": flags})}
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata)
        partial.replace(path)
        return path


def load_statistics(path: str | Path) -> Statistics:
    """Read what `Statistics.save` wrote.

    Raises:
        UsageError: Not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            head = json.loads((file.metadata() or {})["mha2gqa"])
            sites = {}
            for key, flags in head["sites"].items():
                names = {f"{key}.{name}" for name in ("inputs", "mixed", "queries")} & set(file.keys())
                found = {name.rsplit(".", 1)[1]: _unpacked(file.get_tensor(name)) for name in names}
                sites[key] = SiteStatistics(
                    found["inputs"], found.get("mixed"), found.get("queries"), flags["tokens"], flags["cross"]
                )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UsageError(
            f"not a statistics file of ours ({str(error) or type(error).__name__})",
            where=f"--statistics {path}",
            fix="make it with --calibration TEXT --statistics FILE",
        ) from error
    return Statistics(sites, head["about"])


def _packed(x: Tensor) -> Tensor:
    """Symmetric `[…, n, n]` -> its lower triangle `[…, n (n + 1) / 2]`."""
    rows, columns = torch.tril_indices(x.shape[-1], x.shape[-1])
    return x[..., rows, columns].contiguous()


def _unpacked(packed: Tensor) -> Tensor:
    n = int(((8 * packed.shape[-1] + 1) ** 0.5 - 1) / 2 + 0.5)
    rows, columns = torch.tril_indices(n, n)
    out = packed.new_empty(*packed.shape[:-1], n, n)
    out[..., rows, columns] = packed
    out[..., columns, rows] = packed
    return out


def site_key(site: AttentionSite) -> str:
    """Name of a module that does not depend on how a checkpoint or a class prefixes it."""
    return f"{site.kind}.{site.layer}"


def fingerprint(sites: Sequence[AttentionSite], read: Callable[[str], Tensor]) -> str:
    """A short digest of the attention weights, to tell whether statistics belong to a model."""
    digest = hashlib.sha256()
    for site in sites:
        name = site.names.get("q.weight") or site.names["qkv.weight"]
        digest.update(site_key(site).encode())
        digest.update(read(name).detach()[:2].to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


# --- collecting ----------------------------------------------------------------------------------------


class _Accumulator:
    """Running sums of one module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.inputs: Tensor | None = None
        self.mixed: Tensor | None = None
        self.queries: Tensor | None = None
        self.tokens = self.read = 0
        self.cross = False
        self.current: Tensor | None = None  # [B, S, n] of the pass that is running
        self.received: Tensor | None = None  # [B, S] attention received in it

    def see(self, states: Tensor, cross: bool) -> None:
        """Inputs of keys and values, `[B, S, D]`."""
        x = states.detach().to(torch.float64)
        self.current = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
        self.received = None
        self.cross = cross

    def attend(self, queries: Tensor, weights: Tensor) -> None:
        """Queries `[B, H, T, d]` and attention weights `[B, H, T, S]`."""
        assert self.current is not None
        scores = weights.detach().flatten(1, 2).float()  # [B, H T, S]
        self.received = scores.mean(1).to(torch.float64) * scores.shape[2]  # [B, S], about 1 on average
        gram = (scores.mT @ scores).to(torch.float64) / weights.shape[1]  # [B, S, S]
        mixed = sum(x.T @ (g @ x) for g, x in zip(gram, self.current, strict=True))
        assert isinstance(mixed, Tensor)
        q = queries.detach().transpose(0, 1).flatten(1, 2).to(torch.float64)  # [H, B T, d]
        second = q.mT @ q
        self.mixed = mixed if self.mixed is None else self.mixed.add_(mixed)
        self.queries = second if self.queries is None else self.queries.add_(second)
        self.read += queries.shape[0] * queries.shape[2]

    def leave(self) -> None:
        """The call is over."""
        assert self.current is not None
        flat = self.current.flatten(0, 1)
        weighted = flat if self.received is None else flat * ((1 + self.received) / 2).flatten()[:, None]
        gram = weighted.T @ flat
        self.inputs = gram if self.inputs is None else self.inputs.add_(gram)
        self.tokens += len(flat)
        self.current = self.received = None

    def finish(self) -> SiteStatistics:
        """Means over tokens."""
        if self.inputs is None:
            raise CheckpointError(
                "was never run on the calibration text", where=self.path, fix="this layout is not supported"
            )

        def mean(x: Tensor | None, count: int) -> Tensor | None:
            return None if x is None else (x + x.mT) / (2 * count)

        inputs = mean(self.inputs, self.tokens)
        assert inputs is not None
        return SiteStatistics(
            inputs, mean(self.mixed, self.read), mean(self.queries, self.read), self.tokens, self.cross
        )


def _key_states(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, bool]:
    """What keys and values of this call are made of, and whether that is another sequence."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    bound = {**bound, **bound.get("kwargs", {})}
    for name in ("key_value_states", "encoder_hidden_states"):
        if bound.get(name) is not None:
            return bound[name], True
    return next(iter(bound.values())), False


@contextlib.contextmanager
def observing(model: Any, modules: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, _Accumulator]]:
    """While open, every forward pass of `model` adds to the accumulators, one per module.

    The model's attention runs through its own eager function (soft caps, sinks and position biases
    included), in float32, and is put back afterwards.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    found = {path: _Accumulator(path) for path in modules}
    running: list[_Accumulator] = []

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kw: Any,
    ) -> tuple[Tensor, Tensor]:
        eager = getattr(module, "eager_attention", None)  # of exported modules; stock ones repeat nothing
        eager = eager or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        out, weights = eager(module, query.float(), key.float(), value.float(), attention_mask, **kw)
        if running:
            running[-1].attend(query, weights)
        return out.to(query.dtype), weights

    def before(accumulator: _Accumulator) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            accumulator.see(*_key_states(module, args, kwargs))
            running.append(accumulator)

        return hook

    def after(*_: Any) -> None:
        running.pop().leave()

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    own = model.config._attn_implementation
    hooks = []
    try:
        with _quiet():
            model.set_attn_implementation(IMPLEMENTATION)
        for path, module in modules.items():
            hooks.append(module.register_forward_pre_hook(before(found[path]), with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        with _quiet():
            model.set_attn_implementation(own)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warning from classes whose attention cannot be swapped: `collect` tells in its own words."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def batches(inputs: Batch | Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive batches of `size` rows; a tensor of ids stands for `input_ids`."""
    rows = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    count = len(next(iter(rows.values())))
    for start in range(0, count, size):
        yield {name: x[start : start + size] for name, x in rows.items()}


def run(model: Any, batch: Batch) -> None:
    """One forward pass for the sake of its hooks: no cache, logits of the last position only."""
    device = next(model.parameters()).device
    extra: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = 1
    model(**{name: x.to(device) for name, x in batch.items()}, **extra)


def _batch_size(model: Any, width: int) -> int:
    text = model.config.get_text_config()
    budget = SCORE_BYTES.get(next(model.parameters()).device.type, SCORE_BYTES["cpu"])
    return max(1, budget // (4 * 4 * text.num_attention_heads * width * width))


@torch.no_grad()
def collect(
    model: Any,
    spec: AttentionSpec,
    inputs: Batch | Tensor,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Measure the moments of every attention module in one pass over token blocks.

    Args:
        model: A transformers model in eval mode.
        spec: Its architecture.
        inputs: `[N, T]` token ids, or keyword tensors of the model's forward with N rows each.
        batch_size: Rows per pass; by default as many as keep attention scores within a fixed budget.
        progress: Called with `(rows done, rows)`.

    Returns:
        The statistics; `about["notes"]` tells what could not be observed.

    Raises:
        DataError: No block was given.
        CheckpointError: Activations are not finite (the module is named).

    Example:
        >>> statistics = collect(model, find_spec(config), blocks[:, :-1])  # doctest: +SKIP
        >>> statistics.save("model.statistics")  # doctest: +SKIP
    """
    rows = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    if not len(rows):
        raise DataError(
            "no text to calibrate on", where="--calibration", fix="give at least one block of text"
        )
    sites = find_sites(spec, model.state_dict().keys())
    modules = {site.path: model.get_submodule(site.path) for site in sites}
    size = batch_size or _batch_size(model, rows.shape[1])
    with observing(model, modules) as found:
        for done, batch in enumerate(batches(inputs, size), 1):
            run(model, batch)
            _check_finite(found.values())
            if progress:
                progress(min(done * size, len(rows)), len(rows))
    out = {site_key(site): found[site.path].finish() for site in sites}
    parameters = model.state_dict()
    about = {
        "tokens": rows.numel(),
        "window": rows.shape[1],
        "data_sha256": _digest(inputs),
        "model": fingerprint(sites, parameters.__getitem__),
        "notes": _notes(out, model),
    }
    return Statistics(out, about)


def _check_finite(accumulators: Any) -> None:
    """Name the first module whose sums are no longer finite."""
    sums = []
    for a in accumulators:
        moments = [x for x in (a.inputs, a.queries, a.mixed) if x is not None]
        sums += [(a.path, x.diagonal(dim1=-2, dim2=-1).sum()) for x in moments]
    if sums and not bool(torch.stack([x for _, x in sums]).isfinite().all()):
        path = next(path for path, x in sums if not bool(x.isfinite()))
        raise CheckpointError(
            "activations are not finite on the calibration text",
            where=path,
            fix="float16 may overflow: load the model in bfloat16 or float32; or the weights hold NaN",
        )


def _digest(inputs: Batch | Tensor) -> str:
    digest = hashlib.sha256()
    for name, x in sorted({"input_ids": inputs}.items() if isinstance(inputs, Tensor) else inputs.items()):
        digest.update(name.encode())
        digest.update(x.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _notes(sites: Mapping[str, SiteStatistics], model: Any) -> list[str]:
    notes = []
    unseen = [key for key, site in sites.items() if site.mixed is None]
    if unseen:
        notes.append(
            f"{type(model).__name__} does not let its attention be observed ({len(unseen)} of {len(sites)} modules): "
            "moments of plain inputs stand in for attention-averaged ones"
        )
    short = [site for site in sites.values() if site.tokens < site.inputs.shape[0]]
    if short:
        notes.append(
            f"{short[0].tokens} calibration tokens cannot fill a moment of {short[0].inputs.shape[0] - 1} dims: at least "
            f"{short[0].inputs.shape[0]} are needed, 100 times as many are good; unseen directions are judged by weights"
        )
    return notes
