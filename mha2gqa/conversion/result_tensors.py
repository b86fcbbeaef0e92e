"""Names, dtypes and shapes of a conversion's result, known before a tensor is read."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import Plan
from .rewrite import module_changes


def result_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the result.

    Args:
        plan: The conversion.
        shapes: Shape by tensor name of the source.
    """
    after = dict(shapes)
    for module in plan.modules:
        stored, lost = module_changes(plan, module, shapes)
        after |= {module.names[role]: shape for role, shape in stored.items()}
        for role in lost:
            del after[module.names[role]]
    if plan.untied:
        head, embedding = plan.untied
        after[head] = shapes[embedding]
    return after


def result_tensors(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of the result.

    Args:
        plan: The conversion.
        shapes: Shape by tensor name of the source.
        dtypes: safetensors dtype by tensor name of the source.
    """
    head, embedding = plan.untied or ("", "")
    return {
        name: (dtypes[embedding if name == head else name], shape)
        for name, shape in result_shapes(plan, shapes).items()
    }
