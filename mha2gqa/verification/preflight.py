"""The checks of publishing, made before the work on the result's config and tensor shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from ..results import Check
from . import loads
from .loads import Tensors, check_hollow
from .tiny_model import NO_TINY_MODEL
from .tiny_random import EQUIVALENCE, check_tiny_random


def check_early(config: Mapping[str, Any], source: Mapping[str, Any], tensors: Tensors) -> list[Check]:
    """Whether the class of a result takes its tensors, and whether a small model of that config computes right.

    Args:
        config: Raw config of the result.
        source: Raw config of the source.
        tensors: Of the result.
    """
    return [*_checked(json.dumps(config), json.dumps(source), json.dumps(dict(tensors)))]


@lru_cache(maxsize=64)
def _checked(config: str, source: str, tensors: str) -> tuple[Check, Check]:
    """`check_early` of JSON, made once: a dry run and every cell of a sweep with that number of heads ask the same."""
    raw = json.loads(config)
    return check_hollow(raw, json.loads(tensors)), check_tiny_random(raw, json.loads(source))


def demand(
    checks: Sequence[Check], config: Mapping[str, Any], where: object, allow_unchecked: bool = False
) -> None:
    """Refuse what publishing would refuse.

    Raises:
        CheckpointError: A check failed.
        UnsupportedModelError: A check cannot be made, and that is not allowed.
    """
    for check in checks:
        if check.ok is False:
            raise CheckpointError(
                f"a result would fail its check: {check.name}: {check.detail}",
                where=where,
                fix=_way_out(check.detail),
            )
    if (names := unchecked(checks, config)) and not allow_unchecked:
        raise UnsupportedModelError(
            f"the result could not be checked: {'; '.join(names)}",
            where=where,
            fix="--allow-unchecked publishes it all the same",
        )


def unchecked(checks: Sequence[Check], config: Mapping[str, Any]) -> list[str]:
    """The checks that must be made of such a result and were not, with reasons.

    Args:
        checks: Of the result.
        config: Its raw config. Of some model types transformers builds no small model; their layouts are proven
            with sizes and inputs of their own (`tests/test_architectures_walk.py`).
    """
    kind = config.get("model_type")
    proven = {EQUIVALENCE} if isinstance(kind, str) and kind in NO_TINY_MODEL else set()
    needed = {loads.NAME, EQUIVALENCE} - proven
    return [f"{check.name}: {check.detail}" for check in checks if check.ok is None and check.name in needed]


def settled(checks: Sequence[Check], config: Mapping[str, Any], allow_unchecked: bool) -> list[Check]:
    """The checks, a failed load taken for no check where the config names code of its own and that is allowed."""
    lenient = allow_unchecked and loads.of_own_code(config)
    return [
        Check(check.name, None, f"not checked: it names code of its own ({check.detail})")
        if lenient and check.ok is False and check.name == loads.NAME
        else check
        for check in checks
    ]


def _way_out(detail: str) -> str:
    if "unknown to the class" in detail:
        return "--drop-extra NAMES leaves out what is not part of the model"
    return "config and tensors must belong together: download or save the model again"
