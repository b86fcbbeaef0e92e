"""What an error in a layer's output does to the predictions of the original model, direction by direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Batch
from .hidden_states import first_tensor
from .train_state import autocast

FLOOR = 0.2  # share of the metric that counts every direction alike
TOKENS = 65_536  # more do not change a moment of some thousand dims


def fisher_metrics(
    model: nn.Module, batches: Sequence[Batch], blocks: Sequence[str], seed: int
) -> list[Tensor]:
    """For each block, a metric in which a squared error is, to second order, what predictions lose by it.

    The gradient of the log-probability of a token drawn from the model's own prediction has as its second
    moment the Fisher information of the hidden state. What comes later normalises each token, so gradients
    are taken relative to the token's length (and errors must be, too: see `Calls`).

    Args:
        model: The original, frozen.
        batches: Inputs; as many are used as hold 65,536 tokens.
        blocks: Paths of its blocks, in order.
        seed: Of the drawn tokens.

    Returns:
        Symmetric `[D, D]` roots, float32, trace of the square D.
    """
    sums: list[Tensor | None] = [None] * len(blocks)

    def watch(at: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = first_tensor(output)
            if not hidden.requires_grad:
                hidden.requires_grad_(True)
            size = hidden.detach().float().square().mean(-1, keepdim=True).sqrt()

            def add(gradient: Tensor) -> None:
                g = (gradient.float() * size).flatten(0, -2).double()
                old = sums[at]
                sums[at] = g.T @ g if old is None else old.add_(g.T @ g)

            hidden.register_hook(add)

        return hook

    hooks = [model.get_submodule(path).register_forward_hook(watch(i)) for i, path in enumerate(blocks)]
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    seen = 0
    try:
        for batch in batches:
            if seen >= TOKENS:
                break
            for row in range(len(next(iter(batch.values())))):
                one = {name: x[row : row + 1].to(device) for name, x in batch.items()}
                with torch.enable_grad(), autocast(next(model.parameters())):
                    logits = model(**one, use_cache=False).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
                (-logits.log_softmax(-1).gather(1, drawn).sum()).backward()
                seen += logits.shape[0]
    finally:
        for hook in hooks:
            hook.remove()
    return [_root(moment) for moment in sums if moment is not None]


def _root(moment: Tensor) -> Tensor:
    """Symmetric root of the moment, scaled to mean diagonal 1 and blended with the identity."""
    moment = (moment + moment.T) / 2
    mean = moment.diagonal().mean()
    moment = moment / mean if float(mean) > 0 else torch.eye(len(moment), dtype=moment.dtype).to(moment)
    values, vectors = torch.linalg.eigh(moment)
    values = ((1 - FLOOR) * values.clamp_min(0) + FLOOR).sqrt()
    return ((vectors * values) @ vectors.T).float()
