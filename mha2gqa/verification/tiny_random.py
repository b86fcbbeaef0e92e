"""Checks on small random models with a checkpoint's config: the stock class must agree with our layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import heads
from ..arch_conversion import ArchConversion
from ..arch_conversion import plan as plan_arch_conversion
from ..architectures import find_attention_modules, find_spec, geometry, lookup
from ..errors import Mha2gqaError, first_line
from ..merging import MERGERS, MergeContext
from ..modeling import exported_class
from ..results import Check
from .tiny_model import (
    Tiny,
    build_tiny,
    model_class,
    run_tiny,
    small_source,
    source_class,
    tiny_config,
    tiny_inputs,
    tiny_model,
    unbuildable,
)
from .wide_heads import frequency_difference, wide_difference, wideness

EQUIVALENCE = "twin oracles"  # the name that results and scripts know it by


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
    cls, many_cls = model_class(config), source_class(config, source)
    if cls is None or many_cls is None:
        return Check(EQUIVALENCE, None, "not checked: no stock class of the installed transformers")
    spec = find_spec(config)
    if (wide := wideness(spec, config, source)) > 1:
        return _check_wide(cls, config, source, wide)
    try:
        # Eager for exported code: stock umT5 of transformers 5.17 looks ahead under SDPA.
        attention = None if exported_class(config) is None else "eager"
        few, many = (tiny_model(c, raw, attention) for c, raw in ((cls, config), (many_cls, source)))
        inputs = tiny_inputs(few[1])
        for tiny in (few, many):
            run_tiny(tiny[2], inputs)
    except unbuildable() as error:
        return _not_run(EQUIVALENCE, cls, error)
    try:
        return _oracles(few, many, inputs)
    except Mha2gqaError as error:
        return Check(EQUIVALENCE, False, str(error))


def _not_run(name: str, cls: Any, error: Exception) -> Check:
    return Check(name, None, f"not checked: no tiny model of {cls.__name__} can be run ({first_line(error)})")


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
            lambda model: run_tiny(model, tiny_inputs(config)),
        )
    except unbuildable() as error:
        return _not_run(name, cls, error)
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
        small = small_source(source)
        original: Any = build_tiny(cls, small)
        if original.get_output_embeddings() is None:
            return Check(name, None, f"not checked: {cls.__name__} has no logits")
        ids = tiny_inputs(small)
        right = run_tiny(original, ids)
    except unbuildable() as error:
        return _not_run(name, cls, error)
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
        got = run_tiny(result, ids)
    except (Mha2gqaError, RuntimeError, ValueError) as error:
        return Check(name, False, first_line(error))
    difference = float((got - right).abs().max() / right.std())
    return Check(name, difference <= 1e-4, f"both classes' logits differ by {difference:.1e} of their spread")


def _oracles(few: Tiny, many: Tiny, inputs: Mapping[str, Tensor]) -> Check:
    """A model with many KV heads that holds another's few, repeated: outputs agree, and pooling gives them back."""
    (spec, config, model), (many_spec, many_config, many_model) = few, many
    state, expanded = model.state_dict(), many_model.state_dict()
    many_shapes = {name: tuple(x.shape) for name, x in expanded.items()}
    expanded |= {name: x for name, x in state.items() if name in expanded and x.shape == expanded[name].shape}
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    modules, expanded_modules = (
        find_attention_modules(spec, state),
        find_attention_modules(many_spec, many_shapes),
    )
    for module, expanded_module in zip(modules, expanded_modules, strict=True):
        tensors = {role: state[name] for role, name in module.names.items()}
        now = geometry(spec, config, module, shapes)
        before = geometry(many_spec, many_config, expanded_module, many_shapes).num_kv_heads
        weights = heads.expand(heads.split(spec, now, tensors), before, spec)
        roles = heads.unsplit(many_spec, weights)
        expanded |= {name: roles[role] for role, name in expanded_module.names.items() if role in roles}
        grouping = heads.neighbours(before, now.num_kv_heads)
        pooled = MERGERS["mean"](weights, grouping, MergeContext(many_spec, 0)).weights
        for role, x in heads.unsplit(many_spec, pooled).items():
            if role in tensors and not torch.equal(x, tensors[role]):
                detail = f"identical heads do not pool to themselves in {module.names[role]}"
                return Check(EQUIVALENCE, False, detail)
    many_model.load_state_dict(expanded)
    a, b = run_tiny(model, inputs), run_tiny(many_model, inputs)
    difference = float((a - b).abs().max() / b.std().clamp_min(1e-12))
    return Check(
        EQUIVALENCE,
        bool(modules) and difference <= 1e-4,
        f"expanded and grouped outputs differ by {difference:.1e} of their spread",
    )
