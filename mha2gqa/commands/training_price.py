"""What uptraining costs: device memory, tokens per second and hours, from shapes and measured constants.

The constants come from `benchmarks/results/uptrain_throughput.json` (1B, every parameter, 1 to 4 cards) and
`uptrain_large.json` (7B); a test holds the estimates within a factor of 1.5 of every row there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.hf_config import is_encoder_decoder, text_config
from ..config import PlanConfig, UptrainConfig
from ..conversion.plan import Plan
from ..conversion.result_tensors import result_shapes
from ..data.windows import LONGEST_WINDOW
from .describe import Description

# Bytes for each trained parameter: float32 weight and gradient, two AdamW moments in 32 or in 8 bits.
OPTIMISERS = {"adamw_torch_fused": 16.0, "adamw_torch_8bit": 10.1}
FROZEN_BYTES = 2
LOADED_BYTES = 4  # of a weight of the student on the host: models are read in float32
ROUNDED_BYTES = 1  # of a weight of the teacher in 8 bits
AUTOCAST_BYTES = 2  # bfloat16 copies of trained weights, for one forward and backward pass
# NF4 with double quantisation: 4 bits, and 8 bits + 32/256 bits of scales for 64 weights (arXiv:2305.14314).
QUANTISED_BYTES = (4 + (8 + 32 / 256) / 64) / 8
DEVICES, SHARDED = (1, 2, 4, 8), ("all", "attention")  # adapters do not train under FSDP
CARDS = (1, 2)  # of which prices are given
BLOCKS = (8, 4, 2, 1)  # of a forward pass of one process: the most that fit are taken
# What a token keeps in each layer for the backward pass, as multiples of the widths D and F: in compiled layers, which
# long runs have, and without.
KEPT_BYTES = {True: (15, 7), False: (45, 14)}
LOGIT_BYTES = 1.5e9  # of a chunk of logits, its gradient and CUDA's context
TRAIN_FLOPS = 5.5e14  # sustained by an H100 or H200 in bfloat16, operations per second
CARDS_SHARE = 0.94  # of a further card that is used
# Under offload: bytes that a weight of the layer at work takes on the device (gathered in bfloat16, that of the next layer
# too, and its gradient in float32), and what a token and a step wait for.
UNIT_BYTES = 12
LINK = 4e10  # bytes per second between a card and pinned memory
HOST_MEMORY = 6e10  # bytes per second of the host's memory under AdamW
PASS_BYTES = 12  # of a trained weight, to add up the gradients of a pass
STEP_BYTES = 40  # of a trained weight, to clip and to step
STEP_TOKENS = 65_536  # of a step, the default of budgets that are long enough for a price
UNPRICED = (
    "The speed of uptraining is not estimated for an encoder-decoder: it hangs on the lengths of sources and targets, "
    "and only decoders were measured. `uptrain` counts target tokens of pairs, or tokens of plain text (T5), and says "
    "before it starts how many steps those are."
)


@dataclass(frozen=True)
class Way:
    """How a parameter set is trained.

    Args:
        optim: A key of `OPTIMISERS`.
        teacher: Dtype of the teacher's linear layers, None where there is no teacher.
        offload: Whether weights, gradients and moments of the student are on the host (FSDP2).
    """

    optim: str = "adamw_torch_fused"
    teacher: str | None = "bfloat16"
    offload: bool = False


PLAIN = Way()
WAYS = (PLAIN, Way(optim="adamw_torch_8bit"), Way(teacher="int8"), Way(offload=True))


@dataclass(frozen=True)
class Sizes:
    """What the figures are made of.

    Args:
        total, teacher: Parameters of the student and of the teacher.
        multiplied, teacher_multiplied: Of those, what multiplies: all but an input embedding that is only looked up.
        trained: Of each parameter set.
        quantised: Of the student, what qlora keeps in 4 bits.
        rounded: Of the teacher, what 8 bits can hold.
        unit: Of the student, the largest part that is gathered at once: a layer, or an embedding.
        layers, hidden, feed: Layers, width D, and width F of the widest weight.
        attention_flops: Of a token's attention over a window, in one forward pass.
    """

    total: int
    teacher: int
    multiplied: int
    teacher_multiplied: int
    trained: Mapping[str, int]
    quantised: int
    rounded: int
    unit: int
    layers: int
    hidden: int
    feed: int
    attention_flops: float

    def state(self, train: str, optim: str = PLAIN.optim) -> float:
        """Bytes of weights, gradients and optimiser of a parameter set."""
        number = self.trained[train]
        frozen = FROZEN_BYTES * (self.total - number) if train != "all" else 0
        saved = (FROZEN_BYTES - QUANTISED_BYTES) * self.quantised if train == "qlora" else 0
        return OPTIMISERS[optim] * number + frozen - round(saved)

    def teacher_bytes(self, dtype: str | None) -> int:
        """Bytes of the teacher, 0 for None."""
        if dtype is None:
            return 0
        saved = FROZEN_BYTES - ROUNDED_BYTES if dtype == "int8" else 0
        return FROZEN_BYTES * self.teacher - saved * self.rounded

    def flops(self, train: str) -> float:
        """Of one token: the student forward and backward (no gradients of frozen weights), the teacher forward."""
        forward = 2 * self.multiplied + self.attention_flops
        frozen = max(0, self.multiplied - self.trained[train])
        return 3 * forward - 2 * frozen + 2 * self.teacher_multiplied + self.attention_flops

    def token_bytes(self, compiled: bool = True) -> float:
        """What a token of a forward pass keeps for the backward pass."""
        hidden, feed = KEPT_BYTES[compiled]
        return self.layers * (hidden * self.hidden + feed * self.feed)


def training_price(
    model: Description,
    decided: Plan,
    *,
    gpu_memory: float,
    tokens: int = PlanConfig.uptrain_tokens,
    window: int = LONGEST_WINDOW,
) -> dict[str, Any]:
    """Memory, speed and hours of `uptrain` for each parameter set.

    Args:
        model: The original.
        decided: Its conversion.
        gpu_memory: Bytes of one device.
        tokens: Budget of which the hours are given.
        window: Tokens of a block.

    Returns:
        `gpu_memory`, `tokens`, `window`, `teacher_bytes`, and `sets`: of each `trained_parameters`, `bytes` of weights,
        gradients, optimiser and bf16 teacher, `without_teacher`, `gpus` (the smallest number of equal devices among 1, 2,
        4, 8 that hold them and one block; 0 where 8 are too few), `most_gpus`, and `prices`: for each of `WAYS` and number
        of `gpus` the `blocks` of a forward pass that fit, `device_bytes` with them, `host_bytes` of all processes,
        `tokens_per_second` and `hours`. `unpriced` says why there are no prices; it is empty where there are.

    Example:
        >>> training_price(model, decided, gpu_memory=80e9)["sets"]["lora"]["gpus"]  # doctest: +SKIP
        1
    """
    sizes = sizes_of(model, decided, window)
    teacher = sizes.teacher_bytes("bfloat16")
    unpriced = UNPRICED if is_encoder_decoder(model.config) else ""
    sets: dict[str, dict[str, Any]] = {}
    for train, number in sizes.trained.items():
        devices = DEVICES if train in SHARDED else DEVICES[:1]
        one = [device_bytes(sizes, train, n, window) for n in devices]
        sets[train] = {
            "trained_parameters": number,
            "bytes": round(sizes.state(train) + teacher),
            "without_teacher": round(sizes.state(train)),
            "gpus": next((n for n, need in zip(devices, one, strict=True) if need <= gpu_memory), 0),
            "most_gpus": devices[-1],
            "prices": [
                price(sizes, train, way, n, gpu_memory, tokens, window)
                for way in WAYS
                for n in CARDS
                if n in devices and not unpriced and not (way.offload and train not in SHARDED)
            ],
        }
    found = {"gpu_memory": gpu_memory, "tokens": tokens, "window": window, "teacher_bytes": teacher}
    return found | {"sets": sets, "unpriced": unpriced}


def price(
    sizes: Sizes, train: str, way: Way, gpus: int, gpu_memory: float, tokens: int, window: int
) -> dict[str, Any]:
    """One way to train: blocks of a pass, memory, speed, hours; `blocks` 0 where not one fits."""
    need = {n: device_bytes(sizes, train, gpus, n * window, way) for n in BLOCKS}
    blocks = next((n for n in BLOCKS if need[n] <= gpu_memory), 0)
    speed = tokens_per_second(sizes, train, gpus, way, (blocks or 1) * window)
    return {
        "optim": way.optim,
        "teacher_dtype": way.teacher,
        "offload": way.offload,
        "gpus": gpus,
        "blocks": blocks,
        "device_bytes": round(need[blocks or 1]),
        "host_bytes": round(host_bytes(sizes, train, gpus, way)),
        "tokens_per_second": round(speed, 1) if blocks else None,
        "hours": round(tokens / speed / 3600, 2) if blocks else None,
    }


def device_bytes(
    sizes: Sizes, train: str, gpus: int, micro_tokens: int, way: Way = PLAIN, compiled: bool = True
) -> float:
    """Of one device: its share of the student's state and of the teacher (FSDP), and a forward pass.

    Args:
        sizes: Of both models.
        train: The parameter set.
        gpus: That share both.
        micro_tokens: Tokens of a forward pass of one process.
        way: How it is trained.
        compiled: Whether layers are compiled, as in long runs.
    """
    if way.offload:
        student = float(UNIT_BYTES * sizes.unit)
    else:
        copies = AUTOCAST_BYTES * sizes.trained[train] if gpus == 1 else 0
        student = sizes.state(train, way.optim) / gpus + copies
    teacher = sizes.teacher_bytes(way.teacher) / gpus
    return student + teacher + sizes.token_bytes(compiled) * micro_tokens + LOGIT_BYTES


def host_bytes(sizes: Sizes, train: str, gpus: int, way: Way = PLAIN) -> float:
    """Memory of all processes on one host at the peak, anonymous and pinned.

    Each reads both models whole; under offload they then share out the student's state, which stays.
    """
    read = gpus * (LOADED_BYTES * sizes.total + (FROZEN_BYTES * sizes.teacher if way.teacher else 0))
    if not way.offload:
        return read
    weights = LOADED_BYTES * sizes.total
    state = weights + (OPTIMISERS[way.optim] - LOADED_BYTES) * sizes.trained[train]
    return max(read, (gpus + 1) * weights, state)


def tokens_per_second(
    sizes: Sizes,
    train: str,
    gpus: int = 1,
    way: Way = PLAIN,
    micro_tokens: int = LONGEST_WINDOW,
    step_tokens: int = STEP_TOKENS,
) -> float:
    """Of a long run on cards like an H100.

    Args:
        sizes, train, gpus, way: As in `device_bytes`.
        micro_tokens: Tokens of a forward pass of one process; they count under offload, as do those of a step.
        step_tokens: Tokens of an optimiser step.
    """
    flops = sizes.flops(train)
    if way.teacher is None:
        flops -= 2 * sizes.teacher_multiplied + sizes.attention_flops
    seconds = flops / (TRAIN_FLOPS * (1 + (gpus - 1) * CARDS_SHARE))
    if way.offload:
        trained = sizes.trained[train]
        # Weights go to the cards for the forward and again for the backward pass, gradients come back.
        moved = (
            LOADED_BYTES * (2 * sizes.total + trained) / (gpus * LINK) + PASS_BYTES * trained / HOST_MEMORY
        )
        seconds += moved / (micro_tokens * gpus) + STEP_BYTES * trained / HOST_MEMORY / step_tokens
    return 1 / seconds


def sizes_of(model: Description, decided: Plan, window: int = LONGEST_WINDOW) -> Sizes:
    """Sizes of a model and of its conversion.

    Args:
        model: The original.
        decided: Its conversion.
        window: Tokens that a token's attention is over.
    """
    shapes = result_shapes(decided, dict(model.shapes))
    config = text_config(model.config)
    vocabulary = config.get("vocab_size")
    trained, quantised = _parameter_sets(decided, shapes, vocabulary)
    linear = [math.prod(shape) for name, shape in model.shapes.items() if _rounds(name, shape, vocabulary)]
    inside = [s for name, s in shapes.items() if len(s) == 2 and vocabulary not in s]
    hidden = int(config.get("hidden_size") or config.get("d_model") or config.get("n_embd") or 0)
    blocks = {path.rsplit(".", 1)[0] for path in (m.path for m in decided.modules)}
    width = sum(m.geometry.num_heads * m.geometry.head_dim for m in decided.modules)
    return Sizes(
        total=sum(map(math.prod, shapes.values())),
        teacher=sum(map(math.prod, model.shapes.values())),
        multiplied=_multiplied(shapes, vocabulary),
        teacher_multiplied=_multiplied(model.shapes, vocabulary),
        trained=trained,
        quantised=quantised,
        rounded=sum(linear),
        unit=_largest_unit(shapes),
        layers=len(blocks),
        hidden=hidden or max((min(s) for s in inside), default=0),
        feed=max((max(s) for s in inside), default=0),
        attention_flops=4.0 * width * window,
    )


def _parameter_sets(
    decided: Plan, shapes: Mapping[str, Sequence[int]], vocabulary: int | None
) -> tuple[dict[str, int], int]:
    """Trained parameters of each set, and what qlora quantises."""
    count = {name: math.prod(shape) for name, shape in shapes.items()}
    attention = kv = lora = 0
    whole: set[str] = set()  # what no parameter set leaves frozen
    for module in decided.modules:
        for role, name in module.names.items():
            if name not in count:
                continue
            attention += count[name]
            if role.startswith(("k.", "v.", "qkv.")):
                kv += count[name]
                whole.add(name)
            elif role.endswith(".weight") and len(shapes[name]) == 2:
                lora += UptrainConfig.lora_r * sum(shapes[name])
    linear = {name for name, shape in shapes.items() if len(shape) == 2 and vocabulary not in shape}
    trained = {"all": sum(count.values()), "attention": attention, "lora": kv + lora, "qlora": kv + lora}
    return trained, sum(count[name] for name in linear - whole)


def _rounds(name: str, shape: Sequence[int], vocabulary: int | None) -> bool:
    """Whether a teacher in 8 bits rounds a tensor: linear layers, but for experts, which classes keep in one tensor."""
    return len(shape) == 2 and vocabulary not in shape and ".experts." not in name


def _largest_unit(shapes: Mapping[str, Sequence[int]]) -> int:
    """Parameters of the largest layer, or of the embedding where that is larger."""
    units: dict[str, int] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = name if number is None else ".".join(parts[: number + 1])
        units[key] = units.get(key, 0) + math.prod(shape)
    return max(units.values(), default=0)


def _multiplied(shapes: Mapping[str, Sequence[int]], vocabulary: int | None) -> int:
    """Parameters that multiply: an untied input embedding is only looked up."""
    tables = [math.prod(shape) for shape in shapes.values() if len(shape) == 2 and vocabulary in shape]
    total = sum(map(math.prod, shapes.values()))
    return total - (max(tables) if len(tables) > 1 else 0)
