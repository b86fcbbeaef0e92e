"""A model in memory, as callers of the Python functions hand it over: whole, of plain tensors, with an output head."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.given import require_model
from ..errors import UsageError, listed, quoted
from .hf_config import is_encoder_decoder, longest_context

SAMPLES = 4096  # numbers of a tensor that a fingerprint takes


def require_whole(name: str, model: Any) -> None:
    """Refuse a model in memory whose weights cannot be read and made anew.

    Args:
        name: The argument.
        model: What was given for it.

    Raises:
        UsageError: It is not a model of transformers, or its weights are elsewhere, quantised or sharded.
    """
    require_model(name, model)
    state = model.state_dict()
    require_tensors(name, state)
    _require_tied(name, model, state)
    devices = sorted({str(x.device) for x in state.values()})
    if len(devices) > 1:
        what = f"its weights lie on {len(devices)} devices ({listed(devices)})"
        raise UsageError(what, where=name, fix="load it on one; or convert its folder, which needs no more")


def require_tensors(name: str, state: Any) -> None:
    """Refuse a state dict that does not hold plain tensors with their numbers in memory.

    Args:
        name: The argument it is, or whose it is.
        state: Name -> tensor.

    Raises:
        UsageError: One is something else, elsewhere, quantised or sharded.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"must be a mapping of names to tensors, not {quoted(state)}", where=name)
    for tensor, x in state.items():
        if not isinstance(x, Tensor):
            what = f"{tensor} is not a tensor of torch but {quoted(x)}"
            raise UsageError(
                what, where=name, fix="give tensors by their full names, of weights that are not packed"
            )
        if x.is_meta:
            what = f"{tensor} is on the meta device, where no numbers are"
            raise UsageError(
                what, where=name, fix="load it whole on one device, without offload; or convert its folder"
            )
        if type(x.detach()) is not Tensor:
            what = f"{tensor} is a {type(x).__name__}, quantised or a part of a tensor"
            raise UsageError(what, where=name, fix="load the model in its own dtype, whole on one device")
        if x.is_inference():
            what = f"{tensor} was made in torch.inference_mode(), and cannot be trained or shared"
            raise UsageError(what, where=name, fix="load the model outside of it")


def _require_tied(name: str, model: Any, state: Mapping[str, Tensor]) -> None:
    """Refuse tensors that the config says are one, and that differ: a copy of the model would have one of them."""
    for one, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        a, b = state.get(one), state.get(other)
        if a is None or b is None or a.data_ptr() == b.data_ptr() or torch.equal(a, b):
            continue
        raise UsageError(
            f"{one} is not {other}, which its config ties it to",
            where=name,
            fix="set tie_word_embeddings of its config to False, or tie them again: model.tie_weights()",
        )


def require_class(name: str, model: Any) -> None:
    """Refuse a model that its class does not make from its config: a copy would be another model.

    Args:
        name: The argument.
        model: What was given for it.

    Raises:
        UsageError: The class needs more than a config, or has no place for some tensors.
    """
    kind = type(model)
    needed = [
        p.name
        for p in list(inspect.signature(kind).parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        what = f"a {kind.__name__} is not made of a config alone ({', '.join(needed)})"
        raise UsageError(what, where=name, fix="give the model of transformers inside")
    with torch.device("meta"):
        known = kind(copy.deepcopy(model.config)).state_dict().keys()
    own = model.state_dict().keys()
    if missing := sorted(known - own):
        what = f"its config asks for {listed(missing)}, which it does not have"
        raise UsageError(what, where=name, fix="make its config say what it is (num_hidden_layers, …)")
    if further := sorted(own - known):
        what = f"its class has no place for {listed(further)}"
        raise UsageError(what, where=name, fix="take such modules off, and put them on the result")


def digest(tensors: Mapping[str, Any]) -> str:
    """A fingerprint of tensors of torch or numpy: names, shapes, dtypes, and numbers evenly between first and last.

    Args:
        tensors: By name.
    """
    found = hashlib.sha256()
    for name, x in tensors.items():
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.reshape(-1)[:: max(1, math.prod(x.shape) // SAMPLES)]
        numbers = flat.detach().to("cpu", torch.float64).numpy() if isinstance(x, Tensor) else flat
        found.update(numbers.tobytes())
    return found.hexdigest()[:16]


def require_language_model(name: str, model: Any, *, offloaded: bool = False) -> None:
    """Refuse a model in memory that cannot be run for its logits.

    Args:
        name: The argument.
        model: What was given for it.
        offloaded: Whether accelerate may bring layers from elsewhere when they run; the embedding must be here.

    Raises:
        UsageError: It is not a model of transformers, its weights are not here, or it does not return logits over a vocabulary.
    """
    require_model(name, model)
    absent = [n for n, p in model.named_parameters() if p.is_meta]
    first = next(iter(dict(model.named_parameters())), None)
    moved = offloaded and first not in absent and any(hasattr(m, "_hf_hook") for m in model.modules())
    if absent and not moved:
        what = f"{absent[0]} is on the meta device, where no numbers are"
        raise UsageError(what, where=name, fix="load it whole on one device, without offload")
    if not _gives_logits(model):
        raise UsageError(
            f"a {type(model).__name__} gives no logits of tokens",
            where=name,
            fix="give the model with its language-model head",
        )


def _gives_logits(model: Any) -> bool:
    """Whether a model has an output head, or is of a class that generates with one of its own."""
    own, generates = getattr(model, "get_output_embeddings", None), getattr(model, "can_generate", None)
    if own is None or generates is None:  # no class of transformers: its forward shows
        return True
    return own() is not None or bool(generates())


def position_table(model: Any, config: Mapping[str, Any]) -> int | None:
    """Positions that a model of one decoder has a table of; None where it computes them, and none is too far.

    Args:
        model: The model.
        config: Its raw config.
    """
    if is_encoder_decoder(config):
        return None
    longest, words = longest_context(config), model.get_input_embeddings()
    tables = (m for m in model.modules() if hasattr(m, "num_embeddings") and m is not words)
    # OPT and BART keep two rows before the first position.
    found = longest is not None and any(0 <= m.num_embeddings - longest <= 2 for m in tables)
    return longest if found else None
