"""Convert models and state dicts that are in memory already."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architectures import AttentionSpec, config_changes, find_spec
from ..architectures.explain import refuse_quantised
from ..checkpoints.in_memory_model import require_tensors
from ..config import ConvertConfig
from ..config.option import taken
from ..config.signature import names_in_python
from ..errors import UsageError, quoted
from ..modeling import exported_class, register
from .plan import ATTENTION, Groupings, Plan, plan_for_spec
from .rewrite import ModuleConverter


@names_in_python(ConvertConfig)
def convert_state_dict(
    state_dict: Mapping[str, Tensor],
    spec: AttentionSpec,
    groups: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    method: str = "mean",
    groupings: Groupings | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Convert a model of your own, described by its own spec.

    Args:
        state_dict: Name -> tensor.
        spec: Where its attention is (`modules`, `q`, `k`, `v`, `o`, layout, positions).
        groups: KV heads G to reach.
        num_heads: Query heads H.
        head_dim: Width of a head; rows of q over H where None.
        method: A key of `MERGERS`.
        groupings: Which heads share, by module path; neighbours by default.
        seed: For methods that draw numbers.

    Returns:
        A new dict; tensors that do not change are the same objects.

    Raises:
        UsageError: An argument is invalid, `groups` does not divide the KV heads, or weights are quantised.
        CheckpointError, UnsupportedModelError: The tensors are not those that the spec names.

    Example:
        >>> spec = AttentionSpec(modules=(("self", "blocks.{layer}.attn"),), q="q_linear", k="k_linear",
        ...                      v="v_linear", o="o_linear")
        >>> new = convert_state_dict(model.state_dict(), spec, 2, num_heads=8)  # doctest: +SKIP
    """
    if not isinstance(spec, AttentionSpec):
        raise UsageError(f"must be an AttentionSpec, not {quoted(spec)}", where="spec")
    require_tensors("state_dict", state_dict)
    given = taken(ConvertConfig, {"method": method, "seed": seed})
    config: dict[str, Any] = {spec.heads_key: num_heads}
    if head_dim is not None:
        config[spec.head_dim_key] = head_dim
    shapes = {name: tuple(x.shape) for name, x in state_dict.items()}
    plan = plan_for_spec(spec, config, shapes, groups, given["method"], groupings, given["seed"], ATTENTION)
    for module in plan.modules:
        for name in module.names.values():
            if not state_dict[name].is_floating_point():
                what = f"{name} is of {state_dict[name].dtype}, quantised"
                raise UsageError(what, where="state_dict", fix="give the weights as they were before that")
    return _converted_state(
        [ModuleConverter(plan, s, shapes, state_dict.__getitem__) for s in plan.modules], state_dict
    )


def _converted_state(converters: Sequence[ModuleConverter], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every module's new tensors in place of the old."""
    out = dict(state)
    for converter in converters:
        out |= {name: converter.tensor(role) for role, name in converter.names.items()}
        for name in converter.removed:
            del out[name]
    return out


def plan_model(
    model: Any,
    groups: int,
    method: str,
    groupings: Groupings | None,
    seed: int,
    attention: Sequence[str] = ATTENTION,
    wide: int = 1,
) -> Plan:
    """The conversion of a live model: tensor names are those of its state dict."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    refuse_quantised(config, shapes)
    spec = find_spec(config).in_memory()
    return plan_for_spec(spec, config, shapes, groups, method, groupings, seed, attention, wide)


def assemble(
    model: Any, plan: Plan, converters: Sequence[ModuleConverter], state: Mapping[str, Tensor]
) -> Any:
    """A converted copy of `model`: its class, or the one exported where the stock class has no KV heads.

    Args:
        model: The original, left as it is.
        plan: From `plan_model`.
        converters: One per attention module of `plan`.
        state: The original's state dict.
    """
    new = empty_copy(model, plan)
    tensors = {name: x.detach().clone() for name, x in _converted_state(converters, state).items()}
    new.load_state_dict(tensors, assign=True, strict=True)
    if hasattr(new, "tie_weights"):
        new.tie_weights()
    return new.eval()


def keep_trainable(new: Any, model: Any) -> Any:
    """A converted model whose parameters ask for gradients as those of the same name in the original do; new ones do.

    Args:
        new: The converted model.
        model: The original, as it was given.
    """
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, p in new.named_parameters():
        p.requires_grad_(wanted.get(name, p.is_floating_point()))
    return new


def empty_copy(model: Any, plan: Plan) -> Any:
    """A model of the converted class whose parameters are on the meta device; its buffers are copies.

    Args:
        model: The original.
        plan: From `plan_model`.
    """
    if plan.export is not None:
        register(plan.config)
        chosen = exported_class(plan.config)
        raw = {key: value for key, value in plan.config.items() if key != "auto_map"}
        config = chosen.config_class.from_dict(raw)
        config._attn_implementation = model.config._attn_implementation
    else:
        chosen, config = type(model), _changed_config(model, plan)
    with torch.device("meta"):
        new = chosen(config)
    if plan.wide > 1:
        _rebuild_rotary(new, next(model.buffers()).device)  # parameters may be on the meta device
    buffers = dict(model.named_buffers())  # those that are not saved (RoPE tables) do not depend on K
    for name, buffer in list(new.named_buffers()):
        if buffer.is_meta and name in buffers:
            owner, _, leaf = name.rpartition(".")
            kept = leaf not in new.get_submodule(owner)._non_persistent_buffers_set
            new.get_submodule(owner).register_buffer(leaf, buffers[name].clone(), persistent=kept)
    if hasattr(model, "generation_config"):
        new.generation_config = copy.deepcopy(model.generation_config)
        if pairs := getattr(new.generation_config, "alignment_heads", None):
            new.generation_config.alignment_heads = plan.moved(pairs)
    return new.eval()


def _rebuild_rotary(model: Any, device: torch.device) -> None:
    """Give a model on the meta device the rotary tables of its own config; the original's are narrower."""
    found = [
        (name, m) for name, m in model.named_modules() if hasattr(m, "inv_freq") and hasattr(m, "config")
    ]
    for name, module in found:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, type(module)(module.config).to(device))


def _changed_config(model: Any, plan: Plan) -> Any:
    """The config object of the converted model."""
    if plan.wide > 1:  # rotary keys in both spellings: its class reads them as from a file
        config = type(model.config).from_dict(copy.deepcopy(plan.config))
        config._attn_implementation = model.config._attn_implementation
        return config
    config = copy.deepcopy(model.config)
    if plan.num_kv_heads[0] == plan.num_kv_heads[1]:
        return config
    num_heads = plan.modules[0].geometry.num_heads
    changes = config_changes(plan.spec, plan.source, num_heads, plan.num_kv_heads[1])
    for (*parents, key), value in changes.items():
        node = config
        for parent in parents:
            node = node[parent] if isinstance(node, dict) else getattr(node, parent)
        setattr(node, key, value)
    return config
