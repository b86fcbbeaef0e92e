"""What is done to a model before it trains, and undone afterwards: its loss, dropout, compiling, masks, dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from ..errors import UnsupportedModelError, UsageError
from ..lm_head import LMHead, find_lm_head
from .batches import restarted_positions
from .distributed_training import repeated_layers
from .loss import Objective, TopKLogProbs, chunked_loss, teacher_chunks
from .teacher import Teacher, model_inputs

WORTH_SECONDS = 180  # a run shorter than this is not worth the compiler's minute
ASSUMED_SPEED = 2e14  # FLOP/s of one GPU, to guess a run's length
# The one would replace the forward of the whole model, which returns our loss; the other, Granite's default,
# torch's own cross_entropy for the whole process.
OWN_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


# --- loss ---


def _head_forward(self: nn.Linear, x: Tensor, run: Any = None) -> Any:
    """The output projection; with `run`, the loss is computed here, where sharded weights are whole."""
    return F.linear(x, self.weight, self.bias) if run is None else run(x)


@contextmanager
def loss_attached(model: Any, spec: Objective, teacher: Teacher | None = None) -> Iterator[LMHead | None]:
    """Make `model(input_ids=…, labels=…, teacher=…)` return (summed loss, summed cross-entropy).

    The loss is computed inside the model's own forward, so that wrappers (DDP, FSDP) see one call. Only
    instance attributes are set; they are gone afterwards.

    Args:
        model: The student, a causal or encoder-decoder model of transformers.
        spec: The objective while `teacher` states are passed; plain cross-entropy otherwise.
        teacher: Whose head finishes those states.

    Yields:
        The student's output head, None where its own logits are used.
    """
    outer = model
    if hasattr(model, "get_base_model"):  # peft hands inputs through to the model inside
        model = model.get_base_model()
    head = find_lm_head(model)
    own_forward = model.forward
    base: Any = getattr(model, model.base_model_prefix, None)  # T5 has none

    def forward(
        self: Any, labels: Tensor, teacher_states: Tensor | TopKLogProbs | None = None, **inputs: Any
    ) -> Any:
        # labels [B, T] are already shifted: the target of each position
        chunks: Any = None
        if isinstance(teacher_states, TopKLogProbs):
            chunks = teacher_states.part
        elif teacher_states is not None:
            assert teacher is not None
            chunks = teacher_chunks(teacher_states, teacher.head)
        now = spec if chunks is not None else Objective(compiled=spec.compiled, liger=spec.liger)
        kwargs = model_inputs(inputs)
        if head is None:
            if self.config.is_encoder_decoder and "decoder_input_ids" not in kwargs:
                kwargs["labels"] = labels  # from which it makes its decoder inputs
            logits = own_forward(**kwargs, use_cache=False).logits.flatten(0, 1)
            return chunked_loss(logits, labels.flatten(), now, teacher=chunks)
        states = base(**kwargs, use_cache=False).last_hidden_state.flatten(0, 1)  # [B * T, D]
        return head.module(
            states, run=lambda x: chunked_loss(x, labels.flatten(), now, head=head, teacher=chunks)
        )

    model.forward = MethodType(forward, model)
    if head is not None:
        head.module.forward = MethodType(_head_forward, head.module)  # type: ignore[method-assign]
    try:
        yield head
    finally:
        for module in (outer, model, *([] if head is None else [head.module])):
            module.__dict__.pop("forward", None)  # ours, or accelerate's under bf16 autocast
            module.__dict__.pop("_original_forward", None)  # accelerate's, which holds ours


# --- dropout ---


def set_dropout(model: nn.Module, probability: float) -> float:
    """Set every dropout probability of a model: its dropout layers, and those attention keeps as a number.

    Layers that BART and its kin leave out at random stay in. Adapters keep their dropout.

    Args:
        model: Any transformers model; its config stays as it is.
        probability: 0 to 1.

    Returns:
        The largest probability that was set before.
    """
    before = 0.0
    for path, module in model.named_modules():
        if "lora_dropout" in path:
            continue
        names = ["p"] if isinstance(module, nn.Dropout) else [n for n in vars(module) if "dropout" in n]
        for name in names:
            value = getattr(module, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                before = max(before, float(value))
                setattr(module, name, probability)
        if getattr(module, "layerdrop", 0):
            before = max(before, float(module.layerdrop))  # type: ignore[arg-type]
            module.layerdrop = 0.0
    return before


# --- compiling ---


def compile_layers(model: nn.Module) -> int:
    """Compile each block's forward; hooks, masks and the loss stay outside.

    The blocks share one compiled program. Attention masks are made eagerly, so that a causal model
    without padding keeps the mask-free attention kernel.

    Args:
        model: Any transformers model.

    Returns:
        The number of blocks compiled.
    """
    layers = repeated_layers(model)
    dynamo: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), 16))  # train, eval and gradient-free variants
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
    return len(layers)


def undo_compile(model: nn.Module) -> None:
    """Give the blocks their own forward back."""
    for layer in repeated_layers(model):
        layer.__dict__.pop("forward", None)


def worth_compiling(flops: float, device: torch.device, devices: int) -> bool:
    """Whether a run of `flops` is long enough on a GPU to pay for compiling."""
    return device.type == "cuda" and flops / (ASSUMED_SPEED * devices) > WORTH_SECONDS


# --- documents ---


@contextmanager
def one_document_a_row() -> Iterator[None]:
    """Inside, transformers takes for granted that no row holds several documents kept apart.

    It would look for restarted positions in every forward pass, and wait for the GPU to know. Only for
    batches without `position_ids`, whose positions run on by construction.
    """
    found = getattr(masking_utils, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


@torch.no_grad()
def masks_documents(model: Any) -> bool:
    """Whether position ids that start over keep packed documents apart in this model.

    Two rows share their second document and differ in the first: its hidden states must not.

    Args:
        model: A causal language model of transformers.
    """
    count = min(24, model.config.get_text_config().vocab_size)
    first = torch.arange(1, count)
    second = first.flip(0)
    eos = torch.zeros(1, dtype=torch.long)
    rows = torch.stack([torch.cat([head, eos, second]) for head in (first, first.roll(1))])
    rows = rows.to(next(model.parameters()).device)
    training = model.training
    model.eval()
    positions = restarted_positions(rows.cpu(), 0).to(rows.device)
    logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits.float()
    model.train(training)
    a, b = logits[:, count:]  # both rows' second document
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max().clamp_min(1e-6))


def require_document_masking(model: Any) -> None:
    """Refuse a model in which packed documents would attend to each other.

    Raises:
        UnsupportedModelError: Its attention does not heed restarted positions.
    """
    try:
        apart = masks_documents(model)
    except TypeError:  # its forward takes no position ids
        apart = False
    if not apart:
        raise UnsupportedModelError(
            f"packed documents cannot be kept apart in {type(model).__name__}",
            where="isolate_documents",
            fix="leave it out: documents then attend to what was packed before them, as in pretraining",
        )


# --- dtype ---


@contextmanager
def residual_in_autocast_dtype(model: Any) -> Iterator[None]:
    """Inside, hidden states leave the input embedding in autocast's dtype and stay in it through the layers.

    Under autocast a float32 embedding starts a float32 stream, to which each layer adds in float32.

    Args:
        model: A model of transformers with float32 weights.
    """

    def narrow(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kind = output.device.type
        return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output

    hook = model.get_input_embeddings().register_forward_hook(narrow)
    try:
        yield
    finally:
        hook.remove()


# --- Liger ---


def require_liger() -> None:
    """Say what to install.

    Raises:
        UsageError: liger-kernel is not installed.
    """
    if find_spec("liger_kernel") is None:
        raise UsageError(
            "needs the package liger-kernel", where="use_liger_kernel", fix="pip install liger-kernel"
        )


@contextmanager
def liger_removed_after(model: Any) -> Iterator[None]:
    """Take Liger's kernels out of a model and of its modeling module again.

    They run on GPUs only, while a merge, a check or the user may want a model of that class on a CPU.

    Args:
        model: The model that is trained inside, plain or of peft.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = vars(sys.modules[type(base).__module__])
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)
        for part in model.modules():
            forward = part.__dict__.get("forward")
            if (getattr(forward, "__module__", None) or "").startswith("liger_kernel"):
                for name in ("forward", "extra_repr", "_get_name"):
                    part.__dict__.pop(name, None)
