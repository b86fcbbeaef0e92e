"""Names, dtypes and shapes of a conversion's result, known before a tensor is read; bytes to train it end to end."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import UsageError
from .plan import Plan
from .rewrite import module_changes

ADAM_BYTES = 16  # of a trained element: float32 weight and gradient, two moments


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


def end_to_end_bytes(plan: Plan, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
    """Bytes of both models and the optimiser where all projections are trained together; activations come on top.

    Args:
        plan: The conversion.
        shapes: Shape by tensor name of the source.
        itemsize: Bytes of a weight.
    """
    after = result_shapes(plan, shapes)
    trained = {name for module in plan.modules for name in module.names.values() if name in after}
    weights = sum(map(math.prod, shapes.values())) + sum(map(math.prod, after.values()))
    return itemsize * weights + ADAM_BYTES * sum(math.prod(after[name]) for name in trained)


def end_to_end_refusal(needed: float, free: float, where: object) -> UsageError:
    """The error of a device that cannot hold them.

    Args:
        needed: As `end_to_end_bytes`.
        free: Bytes of the device.
        where: Its name.
    """
    return UsageError(
        f"trains all layers together: both models and the optimiser need {needed / 1e9:.1f} GB, {where} has "
        f"{free / 1e9:.1f} GB free",
        where="--fit distill_steps",
        fix="leave it out, and train the result with uptrain, over several GPUs with --set fsdp=true",
    )
