"""Checks on a finished folder, and oracles on a small twin of the very architecture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from . import heads
from .architectures import AttentionSpec, find_sites, find_spec, geometry, lookup
from .checkpoint import MANIFEST, Checkpoint, edit_config, open_checkpoint, read_json
from .errors import Mha2gqaError
from .merging import MERGERS, MergeContext
from .modeling import exported_class, find_export, modeling_file
from .results import Result


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it held (None: not made, `detail` says why)."""

    name: str
    ok: bool | None
    detail: str


@dataclass
class VerifyResult(Result):
    """Every check made on a folder; `ok` unless one failed."""

    command: ClassVar[str] = "verify"
    path: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not failed(self.checks)


def failed(checks: Sequence[Check]) -> str:
    """The failures in one line; empty if there are none."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.ok is False)


def verify(out: str | Path, *, against: str | Path | None = None, full: bool = False) -> VerifyResult:
    """Check a converted checkpoint.

    Args:
        out: The folder.
        against: The source; tensors that must not change are compared byte by byte, pooled ones recomputed.
        full: Read every tensor and demand finite numbers.

    Returns:
        All checks, also the failed ones.
    """
    checks = verify_folder(Path(out), full=full)
    if not failed(checks):
        checkpoint = open_checkpoint(out)
        spec = find_spec(checkpoint.config)
        sites = find_sites(spec, checkpoint.tensors)
        counts = geometry(spec, checkpoint.config, sites[0], checkpoint.shapes)
        checks.append(check_twin(spec, checkpoint.config, counts.num_heads, counts.num_kv_heads))
        if against is not None:
            checks.append(_guard("against source", lambda: _against(checkpoint, open_checkpoint(against))))
    return VerifyResult(str(out), checks)


def verify_folder(folder: Path, *, expected: Sequence[str] | None = None, full: bool = False) -> list[Check]:
    """Files, key set, shapes against the config, and a load on the meta device."""
    try:
        checkpoint = open_checkpoint(folder)
    except Mha2gqaError as error:
        return [Check("files", False, str(error))]
    checks = [Check("files", True, f"{len(checkpoint.files)} files, {len(checkpoint.tensors)} tensors")]
    if expected is not None:
        missing, extra = (
            sorted(set(expected) - set(checkpoint.tensors)),
            sorted(set(checkpoint.tensors) - set(expected)),
        )
        detail = f"missing {missing}, unexpected {extra}" if missing or extra else "complete"
        checks.append(Check("tensor names", not (missing or extra), detail))
    checks.append(_guard("shapes", lambda: _shapes(checkpoint)))
    if full:
        checks.append(_guard("finite", lambda: _finite(checkpoint)))
    if (export := find_export(checkpoint.config)) and exported_class(checkpoint.config):
        beside = folder / export.file
        if not beside.is_file():
            checks.append(Check("modelling code", False, f"{export.file} is missing"))
        else:  # another version of this package may have written it
            same = beside.read_bytes() == modeling_file(export).read_bytes()
            detail = "as this package writes it" if same else "not the file this package writes"
            checks.append(Check("modelling code", True if same else None, f"{export.file} is {detail}"))
    checks.append(_guard("loads", lambda: _loads(checkpoint)))
    return checks


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Mha2gqaError as error:
        return Check(name, False, str(error))


def _shapes(checkpoint: Checkpoint) -> Check:
    spec = find_spec(checkpoint.config)
    sites = find_sites(spec, checkpoint.tensors)
    counts = {geometry(spec, checkpoint.config, site, checkpoint.shapes).num_kv_heads for site in sites}
    if not sites:
        return Check("shapes", False, "no attention module found")
    return Check("shapes", True, f"{len(sites)} attention modules, KV heads {sorted(counts)}")


def _finite(checkpoint: Checkpoint) -> Check:
    bad = [
        n
        for n in checkpoint.tensors
        if (x := checkpoint.read(n)).is_floating_point() and not x.isfinite().all()
    ]
    return Check(
        "finite", not bad, f"NaN or infinity in {', '.join(bad)}" if bad else "every number is finite"
    )


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class named by the config: stock or exported by us; None for any other code."""
    import transformers

    if (exported := exported_class(config)) is not None:
        return exported
    if "auto_map" in config:
        return None
    names = config.get("architectures") or []
    return next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)


def _loads(checkpoint: Checkpoint) -> Check:
    """A load on the meta device: no tensor may be missing, unexpected or of another shape."""
    cls = _model_class(checkpoint.config)
    if cls is None:
        return Check("loads", None, "not checked: no stock class of the installed transformers")
    try:
        with quiet():
            _, info = cls.from_pretrained(checkpoint.path, device_map="meta", output_loading_info=True)
    except (RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
        return Check("loads", False, f"{cls.__name__}: {str(error).strip().splitlines()[0]}")
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    return Check("loads", not wrong, f"{cls.__name__}: {wrong or 'no missing or unexpected tensor'}")


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no progress bars from transformers inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _against(checkpoint: Checkpoint, source: Checkpoint) -> Check:
    """Unchanged tensors are byte-equal to the source's; mean and first are recomputed."""
    manifest = read_json(checkpoint.path / MANIFEST)
    spec, sites = find_spec(source.config), find_sites(find_spec(source.config), source.tensors)
    touched = {name for site in sites for name in site.names.values()}
    wrong = [n for n in source.tensors if n not in touched and not _same(source.read(n), checkpoint.read(n))]
    if manifest.get("method") in ("mean", "first") and "uptrain" not in manifest:
        for site in sites:
            before = geometry(spec, source.config, site, source.shapes)
            weights = heads.split(
                spec, before, {role: source.read(name) for role, name in site.names.items()}
            )
            merged = MERGERS[manifest["method"]](
                weights, manifest["grouping"][site.path], MergeContext(spec, 0)
            )
            right = heads.unsplit(spec, merged.weights)
            wrong += [n for role, n in site.names.items() if not _same(right[role], checkpoint.read(n))]
    detail = f"differ from what the source gives: {', '.join(wrong[:5])}" if wrong else "as the source gives"
    return Check("against source", not wrong, f"{len(wrong)} tensors {detail}" if wrong else detail)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


# --- the twin --------------------------------------------------------------------------------------------

_TWIN_WIDTH, _TWIN_LAYERS, _TWIN_VOCAB = 8, 2, 96
TWIN_ERRORS = (
    RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, StrictDataclassError,
)  # fmt: skip
_SMALL = {
    "vocab_size": _TWIN_VOCAB, "decoder_vocab_size": _TWIN_VOCAB, "intermediate_size": 32, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "ffn_dim": 32, "n_inner": 32, "ffn_hidden_size": 32, "d_ff": 32,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "word_embed_proj_dim": 32, "num_mel_bins": 8,
    "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "max_source_positions": 8,
    "max_target_positions": 64, "initializer_range": 0.3,
}  # fmt: skip
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("num_layers", "encoder_layers")  # beside the spec's own key: the encoder's


def twin_config(spec: AttentionSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its head counts kept and everything else made small."""
    small = json.loads(json.dumps(config))
    text = small
    for key in spec.config_path:
        text = text[key]
    num_heads, layers = text[spec.heads_key], text.get(spec.layers_key)
    text |= {key: value for key, value in _SMALL.items() if key in text}
    text |= dict.fromkeys([k for k in _WIDTHS if k in text] or _WIDTHS[:1], num_heads * _TWIN_WIDTH)
    if text.get(spec.head_dim_key) is not None:
        text[spec.head_dim_key] = _TWIN_WIDTH
    text |= dict.fromkeys([k for k in _LAYERS if k in text] + [spec.layers_key], _TWIN_LAYERS)
    if "encoder_attention_heads" in text:
        text["encoder_attention_heads"] = num_heads
    for key, value in text.items():
        if isinstance(value, list) and len(value) == layers:
            text[key] = value[:_TWIN_LAYERS]
        if key.endswith("_token_id"):
            text[key] = 1 if text.get("is_encoder_decoder") and value is not None else None
    small.pop("quantization_config", None)
    return small


def check_twin(spec: AttentionSpec, config: Mapping[str, Any], before: int, after: int) -> Check:
    """Run the oracles on random weights in a small model of the very config.

    A random GQA model is expanded to the MHA model it must equal: logits agree, and pooling that MHA
    model gives the GQA tensors back bit for bit. This catches a wrong head order, axis or fused layout.

    Args:
        spec: The architecture.
        config: Raw config of the converted checkpoint.
        before: KV heads of the source.
        after: KV heads of the result.
    """
    name = "twin oracles"
    cls = _model_class(config)
    if cls is None:
        return Check(name, None, "not checked: no stock class of the installed transformers")
    small = twin_config(spec, config)
    try:
        # Eager for exported code: stock umT5 of transformers 5.17 looks ahead under SDPA.
        attention = None if exported_class(config) is None else "eager"
        narrow = build_twin(cls, small, attention)
        wide = build_twin(*_wide_twin(spec, config, small, cls, before), attention)
    except TWIN_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Check(name, None, f"not checked: no small twin of {cls.__name__} can be built ({reason})")
    return _guard(name, lambda: _twin_oracles(spec, small, narrow, wide, before))


def _wide_twin(
    spec: AttentionSpec, config: Mapping[str, Any], small: Mapping[str, Any], cls: Any, before: int
) -> tuple[Any, dict[str, Any]]:
    """Class and config of the model with the source's heads: for exported code, the stock class itself."""
    export = find_export(config)
    if export is None or exported_class(config) is None or before != lookup(config, spec.heads_key):
        return cls, edit_config(small, _kv_keys(spec, config, before))
    import transformers

    ours = ("model_type", "architectures", "auto_map", "num_key_value_heads", "num_cross_key_value_heads")
    return getattr(transformers, export.stock[0]), {k: v for k, v in small.items() if k not in ours}


def build_twin(cls: Any, config: Mapping[str, Any], attention: str | None = None) -> torch.nn.Module:
    """A random model whose every weight matters: matrices of unit gain, biases and norms off their defaults."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = cls.config_class.from_dict(dict(config))
        built._attn_implementation = attention
        model = cls(built).float().eval()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            wide = parameter.dim() > 1
            parameter.data = noise / math.sqrt(parameter.shape[-1]) if wide else parameter.data + 0.1 * noise
    return model


@torch.no_grad()
def _twin_oracles(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    narrow: torch.nn.Module,
    wide: torch.nn.Module,
    before: int,
) -> Check:
    """`narrow` holds G heads, `wide` as many as the source; `wide` receives `narrow`'s heads repeated."""
    state = narrow.state_dict()
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    expanded = dict(state)
    for site in find_sites(spec, state):
        tensors = {role: state[name] for role, name in site.names.items()}
        after = geometry(spec, config, site, shapes)
        weights = heads.expand(heads.split(spec, after, tensors), before, spec)
        expanded |= {site.names[role]: x for role, x in heads.unsplit(spec, weights).items()}
        grouping = heads.neighbours(before, after.num_kv_heads)
        pooled = MERGERS["mean"](weights, grouping, MergeContext(spec, 0)).weights
        for role, x in heads.unsplit(spec, pooled).items():
            if not torch.equal(x, tensors[role]):
                return Check(
                    "twin oracles", False, f"identical heads do not pool to themselves in {site.names[role]}"
                )
    wide.load_state_dict(expanded)
    inputs = _twin_inputs(config)
    a, b = (model(**inputs, use_cache=False).logits for model in (narrow, wide))
    difference = float((a - b).abs().max() / b.std().clamp_min(1e-12))
    return Check(
        "twin oracles",
        difference <= 1e-4,
        f"expanded and grouped logits differ by {difference:.1e} of their spread",
    )


def _twin_inputs(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tokens, and for an encoder-decoder what its encoder reads."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _TWIN_VOCAB, (2, 12), generator=generator)
    if not config.get("is_encoder_decoder"):
        return {"input_ids": ids}
    if (bins := config.get("num_mel_bins")) is not None:
        frames = 2 * config["max_source_positions"]
        return {"input_features": torch.randn(2, bins, frames, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids.flip(1), "decoder_input_ids": ids}


def _kv_keys(spec: AttentionSpec, config: Mapping[str, Any], value: int) -> dict[tuple[str, ...], int]:
    """The KV-head keys that the config has, all set to `value`."""
    keys = tuple(v.kv_heads_key for v in spec.variants) or spec.kv_heads_keys
    text = spec.text_config(config)
    return {(*spec.config_path, *key.split(".")): value for key in keys if lookup(text, key) is not None}
