"""What to do about a checkpoint whose attention tensors are not found: known reasons and remedies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..checkpoints.hf_config import text_config
from ..checkpoints.prefixes import PREFIXES, prefix_of
from ..errors import CheckpointError, UnsupportedModelError, quoted
from .spec import AttentionSpec

# Ends of the names of tensors that hold packed weights, or the scales of such.
_PACKED = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".absmax",
    ".SCB",
    ".scales",
)
DEEPEST = 512  # layers: more than any model has
_ADAPTERS = (".base_layer.", ".lora_A.", ".lora_embedding_A", ".modules_to_save.")
_LATENT = ("kv_a_proj_with_mqa.", "kv_b_proj.", "kv_a_layernorm.")


def refuse_quantised(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a checkpoint whose weights are packed.

    Args:
        config: The raw config.
        names: All tensor names.

    Raises:
        UnsupportedModelError: It is quantised; by what is said.
    """
    kind = None
    if stated := config.get("quantization_config") or text_config(config).get("quantization_config"):
        kind = stated.get("quant_method", "unknown method") if isinstance(stated, dict) else quoted(stated)
    elif isinstance(mlx := config.get("quantization"), dict) and "bits" in mlx:
        kind = f"MLX, {quoted(mlx['bits'])} bits"
    elif packed := next((name for name in names if name.endswith(_PACKED)), None):
        kind = f"it holds {quoted(packed)}"
    if kind is not None:
        raise UnsupportedModelError(
            f"quantised checkpoint ({kind})",
            where="config.json",
            fix="convert the full-precision model first",
        )


def not_found(
    spec: AttentionSpec, config: Mapping[str, Any], names: Collection[str]
) -> UnsupportedModelError:
    """What to say of a checkpoint in which no attention module is found."""
    where = f"model_type {quoted(config.get('model_type'))}"
    if (prefix := prefix_of(names)) is not None:
        return UnsupportedModelError(
            f"every tensor name begins with {prefix!r}", where="its tensors", fix=f"it is {PREFIXES[prefix]}"
        )
    expected = spec.modules[0][1].replace("{layer}", "0")
    return UnsupportedModelError(
        f"no attention projections under the expected names ({spec.prefixes[0]}{expected}.{spec.q}, …)",
        where=where,
        fix="this is not a checkpoint as transformers saves it",
    )


def refuse_adapters(names: Collection[str]) -> None:
    """Refuse a model with adapters in it, whose projections are not what its tensors of those names say.

    Raises:
        UnsupportedModelError: There are such tensors; one is named.
    """
    if adapter := next((name for name in names if any(part in name for part in _ADAPTERS)), None):
        raise UnsupportedModelError(
            f"adapters of PEFT are in it ({quoted(adapter)})",
            where="its tensors",
            fix="take the model that merge_and_unload() returns",
        )


def refuse_latent(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse tensors of multi-head latent attention under the config of another type.

    Raises:
        UnsupportedModelError: There are such tensors; one is named.
    """
    if latent := next((name for name in names if any(part in name for part in _LATENT)), None):
        raise UnsupportedModelError(
            f"its tensors are of multi-head latent attention ({quoted(latent)})",
            where=f"model_type {quoted(config.get('model_type'))}",
            fix="restore the config that came with them; such a cache is compressed already",
        )


def check_layers(spec: AttentionSpec, text: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a config that promises many more layers than there are tensors of, before a class builds them.

    Fewer than `DEEPEST` are left to the class, which knows the types whose layers share their tensors.

    Args:
        spec: The architecture.
        text: The raw config of the text model.
        names: All tensor names.

    Raises:
        CheckpointError: Layers are missing, or their number is none.
    """
    declared = text.get(spec.layers_key)
    if declared is None:
        return
    if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
        raise CheckpointError(
            f"no usable {spec.layers_key} ({quoted(declared)})",
            where="config.json",
            fix="it must be the number of layers",
        )
    stems = [p + t.partition("{layer}")[0] for _, t in spec.modules for p in spec.prefixes if "{layer}" in t]
    found = -1
    for name in names:
        for stem in stems:
            number = name[len(stem) :].partition(".")[0] if name.startswith(stem) else ""
            if number.isdecimal() and len(number) < 10:
                found = max(found, int(number))
    if stems and declared > max(found + 1, DEEPEST):
        raise CheckpointError(
            f"{spec.layers_key} is {quoted(declared)}, the tensors are of {found + 1} layers",
            where="config.json",
            fix="restore the config that came with these tensors, or download the missing ones",
        )
