"""Oracles on a small random model with the very config of a checkpoint: the stock class judges our layouts."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import heads
from ..arch_conversion import ArchConversion
from ..arch_conversion import plan as plan_arch_conversion
from ..architectures import AttentionSpec, find_attention_modules, find_spec, geometry, lookup
from ..checkpoints.hf_config import is_encoder_decoder
from ..checkpoints.loading import loading_class, quiet
from ..data.pairs import is_audio
from ..errors import Mha2gqaError
from ..merging import MERGERS, MergeContext
from ..modeling import exported_class, find_export, part_class
from .wide_heads import cut_factors, frequency_difference, wide_difference, wideness, width

_WIDTH, _LAYERS, _VOCAB = 8, 2, 96
_SMALL = {
    "vocab_size": _VOCAB, "decoder_vocab_size": _VOCAB, "vocab_size_per_layer_input": _VOCAB,
    "unpadded_vocab_size": _VOCAB, "moe_hidden_size": 16,
    "intermediate_size": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "ffn_dim": 32,
    "n_inner": 32, "ffn_hidden_size": 32, "d_ff": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "word_embed_proj_dim": 32, "num_mel_bins": 8, "max_position_embeddings": 64, "n_positions": 64,
    "max_seq_len": 64, "mamba_chunk_size": 8, "max_source_positions": 8, "max_target_positions": 64, "initializer_range": 0.3,
}  # fmt: skip
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_ENCODER_LAYERS = ("num_layers", "encoder_layers", "encoder_num_hidden_layers")  # beside the spec's own key
_ENCODER_HEADS = ("encoder_attention_heads", "encoder_num_attention_heads", "encoder_num_key_value_heads")
_SAMPLES = 4000  # of sound
KERNELS = (
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
)  # fmt: skip
CODE = ("auto_map", "architectures")
EQUIVALENCE = "twin oracles"  # the name that results and scripts know it by
LARGEST = 50_000_000  # parameters of a small model: what a config keeps wide after all is not built
# Types of which transformers cannot build or run a small model of the text model alone. (Of
# evolla, nemo_speechlm and phi4_multimodal it would be larger than `LARGEST`: parts beside attention keep their width.)
NO_TINY_MODEL = frozenset({
    "blt", "canary", "cohere_asr", "deepseek_ocr2", "dia", "diffusion_gemma", "emu3", "ernie4_5_vl_moe", "evolla",
    "gemma3n", "gemma3n_text", "granite4_vision", "kyutai_speech_to_text", "mllama", "nemo_speechlm",
    "paddleocr_vl", "phi4_multimodal", "pi0",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "step3p7", "t5gemma", "t5gemma2", "unlimited_ocr",
    "voxtral_realtime", "zamba",
})  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it held (None: not made, `detail` says why)."""

    name: str
    ok: bool | None
    detail: str


def _unbuildable() -> tuple[type[Exception], ...]:
    """What a class may raise for sizes or inputs it cannot take."""
    # Not above: it loads an HTTP client, which converting does not need.
    from huggingface_hub.errors import StrictDataclassError

    return (
        RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ImportError,
        ArithmeticError, StrictDataclassError,
    )  # fmt: skip


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that holds a checkpoint, or the one exported by us; None where there is none.

    The one that the config names, if it is of the config's model type; else the one that transformers takes for
    that type. So a config that names code of its own, or nothing, is held against the stock class all the same.
    """
    import transformers

    if (exported := exported_class(config)) is not None:
        return exported
    kind, names = config.get("model_type"), config.get("architectures")
    for name in names if isinstance(names, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        own = getattr(getattr(found, "config_class", None), "model_type", None)
        if found is not None and own == kind:
            return found
    return _usual_class(config)


def _usual_class(config: Mapping[str, Any]) -> Any:
    """The class that the auto classes take for a model type; None where they know none."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    named = {key: value for key, value in config.items() if key not in CODE}
    found = loading_class(named)._model_mapping.get(CONFIG_MAPPING[kind], None)
    return found[0] if isinstance(found, tuple) else found


def of_own_code(config: Mapping[str, Any]) -> bool:
    """Whether a config names code of its own to be loaded with, which is not ours."""
    return "auto_map" in config and exported_class(config) is None


def neutral(value: Any) -> Any:
    """A part of a raw config without what chooses kernels or code: it must not choose what is checked."""
    if isinstance(value, Mapping):
        return {key: neutral(part) for key, part in value.items() if key not in (*KERNELS, *CODE)}
    return [neutral(part) for part in value] if isinstance(value, list) else value


def _stock_class(config: Mapping[str, Any], source: Mapping[str, Any]) -> Any:
    """The class of the source: for a result with exported code, the stock class that the code stands for."""
    import transformers

    export = find_export(config)
    if export is None or exported_class(config) is None or exported_class(source) is not None:
        return model_class(source)
    return getattr(transformers, export.stock[0])


def tiny_config(spec: AttentionSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The (text) config with its head counts kept and everything else made small."""
    text = json.loads(json.dumps(neutral(spec.text_config(config))))
    encoder_decoder = is_encoder_decoder(text)
    num_heads, layers = lookup(text, spec.heads_key), text.get(spec.layers_key)
    if (own := width(replace(spec, config_path=()), text)) > 0:
        cut_factors(text, own, _WIDTH)
    text |= {key: value for key, value in _SMALL.items() if key in text or _slow_by_default(text, key)}
    text |= dict.fromkeys([k for k in _WIDTHS if k in text] or _WIDTHS[:1], num_heads * _WIDTH)
    for key in {spec.head_dim_key, *(v.head_dim_key for v in spec.variants)} & text.keys():
        text[key] = None if text[key] is None else _WIDTH
    text |= dict.fromkeys([k for k in _ENCODER_LAYERS if k in text] + [spec.layers_key], _LAYERS)
    text |= dict.fromkeys([key for key in _ENCODER_HEADS if key in text], num_heads)
    for key, value in text.items():
        if isinstance(value, list) and len(value) == layers:
            text[key] = value[:_LAYERS]
        if key.endswith("_token_id") and value is not None:
            text[key] = 1 if encoder_decoder else 0
    text.pop("quantization_config", None)
    return text


def _slow_by_default(config: Mapping[str, Any], key: str) -> bool:
    """Whether a key that a config lacks makes its class slow: scans over long chunks, a hundred times the rest."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if key != "mamba_chunk_size" or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    return hasattr(CONFIG_MAPPING[kind], key)


def check_tiny_random(config: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> Check:
    """Run the oracles on random weights in a small model of the very config.

    A random GQA model is expanded to the MHA model it must equal: outputs agree, and pooling that MHA
    model gives the GQA tensors back bit for bit. This catches a wrong head order, axis or fused layout.
    Of a model with a text model inside, the text model alone is built.

    Args:
        config: Raw config of the converted checkpoint.
        source: Raw config of the source; the same where only one model is at hand.
    """
    source = config if source is None else source
    cls, wide_cls = model_class(config), _stock_class(config, source)
    if cls is None or wide_cls is None:
        return Check(EQUIVALENCE, None, "not checked: no stock class of the installed transformers")
    spec = find_spec(config)
    if (wide := wideness(spec, config, source)) > 1:
        return _check_wide(cls, config, source, wide)
    try:
        # Eager for exported code: stock umT5 of transformers 5.17 looks ahead under SDPA.
        attention = None if exported_class(config) is None else "eager"
        few, many = (_tiny_model(c, raw, attention) for c, raw in ((cls, config), (wide_cls, source)))
        inputs = _inputs(few[1])
        for tiny in (few, many):
            _run(tiny[2], inputs)
    except _unbuildable() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Check(EQUIVALENCE, None, f"not checked: no tiny model of {cls.__name__} can be run ({reason})")
    try:
        return _oracles(few, many, inputs)
    except Mha2gqaError as error:
        return Check(EQUIVALENCE, False, str(error))


def _check_wide(cls: Any, config: Mapping[str, Any], source: Mapping[str, Any], wide: int) -> Check:
    """`check_tiny_random` where the result's heads are wider than the source's."""
    name, spec = EQUIVALENCE, find_spec(config)
    groups = wide * lookup(spec.text_config(config), spec.kv_heads_keys[0])
    turned = frequency_difference(spec, config, source, wide)
    if turned > 1e-5:
        return Check(name, False, f"rotary frequencies differ from the source's by {turned:.1e}")
    inside = bool(spec.config_path)
    own = replace(spec.in_memory(), config_path=())
    try:
        difference = wide_difference(
            own,
            tiny_config(spec, source),
            groups,
            wide,
            lambda raw: build_tiny(cls, raw, None, inside),
            lambda model: _run(model, _inputs(config)),
        )
    except _unbuildable() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Check(name, None, f"not checked: no tiny model of {cls.__name__} can be run ({reason})")
    return Check(
        name,
        difference <= 1e-4,
        f"GQA-{groups} and its wide form of {groups // wide} x {wide} differ by {difference:.1e} of their spread",
    )


def check_arch_conversion(source: Mapping[str, Any], found: ArchConversion) -> Check:
    """Hold an architecture conversion against the source's own class, on a small random model of the very config.

    Both must give the same logits. This catches a wrong layout, row order or config key.

    Args:
        source: Raw config of the source.
        found: How it is written as another architecture.
    """
    name = "re-expression"
    cls = model_class(source)
    if cls is None:
        return Check(name, None, f"not checked: transformers has no class for {found.source_type} models")
    try:
        small = _small_source(source)
        original: Any = build_tiny(cls, small)
        if original.get_output_embeddings() is None:
            return Check(name, None, f"not checked: {cls.__name__} has no logits")
        ids = _inputs(small)
        right = _run(original, ids)
    except _unbuildable() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Check(name, None, f"not checked: no tiny model of {cls.__name__} can be run ({reason})")
    state = original.state_dict()
    try:
        again = plan_arch_conversion(small, state, None, found.target_type)
        assert again is not None, found
        result = build_tiny(model_class(again.config), again.config)
        made = {
            new: recipe.make(*(state[x] for x in recipe.sources)) for new, recipe in again.recipes.items()
        }
        missing, unexpected = result.load_state_dict(made, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:  # absent where tied
            return Check(name, False, f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")
        got = _run(result, ids)
    except (Mha2gqaError, RuntimeError, ValueError) as error:
        return Check(name, False, str(error).splitlines()[0])
    difference = float((got - right).abs().max() / right.std())
    return Check(name, difference <= 1e-4, f"both classes' logits differ by {difference:.1e} of their spread")


def _small_source(config: Mapping[str, Any]) -> dict[str, Any]:
    """A small config of a model that has no entry in the table of its own."""
    heads_key, layers_key = (
        next(key for key in keys if key in config)
        for keys in (("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer"))
    )
    spec = AttentionSpec(heads_key=heads_key, layers_key=layers_key)
    small = tiny_config(spec, config)
    if isinstance(small.get("rotary_dim"), int):
        small["rotary_dim"] = _WIDTH // 2
    if small.get("word_embed_proj_dim") is not None:
        small["word_embed_proj_dim"] = small["hidden_size"]
    return small


Tiny = tuple[AttentionSpec, Mapping[str, Any], torch.nn.Module]


def _tiny_model(cls: Any, config: Mapping[str, Any], attention: str | None) -> Tiny:
    """A small random model, its (text) config, and the spec that describes them."""
    spec = find_spec(config).in_memory()
    small = tiny_config(spec, config)
    part = part_class(config)
    inside = bool(spec.config_path) and part is None
    # Nothing leads to the text model's config any more: it is all there is.
    return replace(spec, config_path=()), small, build_tiny(part or cls, small, attention, inside)


def build_tiny(
    cls: Any, config: Mapping[str, Any], attention: str | None = None, inside: bool = False
) -> torch.nn.Module:
    """A random model whose every weight matters: matrices of unit gain, biases and norms off their defaults.

    Args:
        cls: The checkpoint's class.
        config: Raw config.
        attention: Attention implementation; the class's choice where None.
        inside: Whether `config` is that of a text model inside a larger one: `cls` is not used then.

    Raises:
        ValueError: It would have more than `LARGEST` parameters.
    """
    from transformers import MODEL_MAPPING, AutoConfig, AutoModel

    with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        built = (AutoConfig if inside else cls.config_class).from_pretrained(folder)
        if inside and type(built) not in MODEL_MAPPING:  # to ask for its class would import every other
            raise ValueError(f"{type(built).__name__} has no model class of its own")
        built._attn_implementation = attention
        make = (lambda: AutoModel.from_config(built)) if inside else (lambda: cls(built))
        if (size := _parameters(make)) > LARGEST:
            raise ValueError(f"{size / 1e6:,.0f} million parameters")
        model = make().float().eval()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            wide = parameter.dim() > 1
            parameter.data = noise / math.sqrt(parameter.shape[-1]) if wide else parameter.data + 0.1 * noise
    return model


def _parameters(make: Callable[[], Any]) -> int:
    """Parameters of a model, counted without making one; 0 where its class asks for values meanwhile.

    What else is wrong with a config is met here, before anything large has been made.
    """
    with suppress(RuntimeError), torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
    return 0


def _inputs(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tokens, and for an encoder-decoder what its encoder reads."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _VOCAB, (2, 12), generator=generator)
    if (
        config.get("model_type") == "musicgen_decoder"
    ):  # rows of each codebook, and what the text encoder gives
        ids = torch.randint(3, _VOCAB, (2 * config["num_codebooks"], 12), generator=generator)
        return {
            "input_ids": ids,
            "encoder_hidden_states": torch.randn(2, 5, config["hidden_size"], generator=generator),
        }
    if not is_encoder_decoder(config):
        return {"input_ids": ids}
    if config.get("num_mel_bins") is not None:
        frames = 2 * config["max_source_positions"]
        features = torch.randn(2, config["num_mel_bins"], frames, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    if is_audio(config):
        return {"input_values": torch.randn(2, _SAMPLES, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids.flip(1), "decoder_input_ids": ids}


def _run(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits, or hidden states of a text model without a head."""
    with torch.no_grad():
        out = model(**inputs, use_cache=False)
    return out.logits if "logits" in out else out.last_hidden_state


def _oracles(few: Tiny, many: Tiny, inputs: Mapping[str, Tensor]) -> Check:
    """The model with many KV heads receives the other's, repeated."""
    (spec, config, narrow), (wide_spec, wide_config, wide) = few, many
    state, expanded = narrow.state_dict(), wide.state_dict()
    wide_shapes = {name: tuple(x.shape) for name, x in expanded.items()}
    expanded |= {name: x for name, x in state.items() if name in expanded and x.shape == expanded[name].shape}
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    modules, wide_sites = find_attention_modules(spec, state), find_attention_modules(wide_spec, wide_shapes)
    for module, wide_site in zip(modules, wide_sites, strict=True):
        tensors = {role: state[name] for role, name in module.names.items()}
        now = geometry(spec, config, module, shapes)
        before = geometry(wide_spec, wide_config, wide_site, wide_shapes).num_kv_heads
        weights = heads.expand(heads.split(spec, now, tensors), before, spec)
        wide_roles = heads.unsplit(wide_spec, weights)
        expanded |= {name: wide_roles[role] for role, name in wide_site.names.items() if role in wide_roles}
        grouping = heads.neighbours(before, now.num_kv_heads)
        pooled = MERGERS["mean"](weights, grouping, MergeContext(wide_spec, 0)).weights
        for role, x in heads.unsplit(wide_spec, pooled).items():
            if role in tensors and not torch.equal(x, tensors[role]):
                return Check(
                    EQUIVALENCE,
                    False,
                    f"identical heads do not pool to themselves in {module.names[role]}",
                )
    wide.load_state_dict(expanded)
    a, b = _run(narrow, inputs), _run(wide, inputs)
    difference = float((a - b).abs().max() / b.std().clamp_min(1e-12))
    return Check(
        EQUIVALENCE,
        bool(modules) and difference <= 1e-4,
        f"expanded and grouped outputs differ by {difference:.1e} of their spread",
    )
