"""A model in memory, written as another architecture."""

from __future__ import annotations

import json
from typing import Any

from .routes import plan


def arch_converted_model(model: Any, groups: int | None = None, as_: str | None = "auto") -> Any:
    """The model in the architecture it is converted in: itself, or one of another class with the same function.

    Args:
        model: A `transformers` model; left as it is.
        groups, as_: As `plan` takes them, which says what is raised.

    Returns:
        `model`, or a new model in eval mode, on its device and in its dtype.
    """
    found = plan(json.loads(model.config.to_json_string(use_diff=False)), model.state_dict(), groups, as_)
    if found is None:
        return model
    import transformers

    cls = getattr(transformers, found.config["architectures"][0])
    raw = {key: value for key, value in found.config.items() if key not in ("architectures", "model_type")}
    config = cls.config_class(**raw)
    config._attn_implementation = model.config._attn_implementation
    new = cls(config).to(device=model.device, dtype=model.dtype)
    state = model.state_dict()
    made = {name: r.make(*(state[part] for part in r.sources)) for name, r in found.recipes.items()}
    missing, unexpected = new.load_state_dict(made, strict=False)
    assert not unexpected and set(missing) <= set(new.all_tied_weights_keys), (missing, unexpected)
    new.tie_weights()
    if model.can_generate():
        new.generation_config = model.generation_config
    return new.eval()
