"""Gradients of attention behind a mask that are not finite, by kernel: why fits and uptraining keep off cuDNN's there.

    python benchmarks/masked_gradients.py [--model MODEL --batches BATCHES.pt]

Queries all of whose logits are below -88, in half precision, at several numbers of keys. With MODEL, an encoder-decoder, and
BATCHES (torch.save of step -> (inputs, labels)) also the gradients of its parameters. Needs a GPU; written to
benchmarks/results/masked_gradients.json.
"""

from __future__ import annotations

import argparse
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, provenance, write_json
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSeq2SeqLM

from mha2gqa.reconstruct.train_state import behind_masks

LENGTHS = (62, 64, 128, 192)
WAYS = ("as torch chooses", "behind_masks", "efficient", "math")


def way(name: str) -> AbstractContextManager[Any]:
    """The kernels of a name."""
    if name == "behind_masks":
        return behind_masks()
    if name == "as torch chooses":
        return nullcontext()
    first = SDPBackend.EFFICIENT_ATTENTION if name == "efficient" else SDPBackend.MATH
    return sdpa_kernel([first, SDPBackend.MATH])


def of_attention(length: int, kernels: str, device: str) -> list[int]:
    """Entries of the gradients of q, k and v that are not finite."""
    torch.manual_seed(0)
    size = 32
    sizes = (0.1, 0.1, 1)
    tensors = [torch.randn(2, 8, length, size, device=device, dtype=torch.bfloat16) * s for s in sizes]
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, -120 * math.sqrt(size)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=device)
    mask[..., length - 5 :] = False
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with way(kernels):
        out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    out.backward(torch.randn_like(out))
    return [int((~leaf.grad.isfinite()).sum()) for leaf in leaves if leaf.grad is not None]


def of_batch(model: Any, rows: dict[str, torch.Tensor], labels: torch.Tensor, kernels: str) -> int:
    """Parameters whose gradient is not finite."""
    model.zero_grad()
    keep = labels != -100
    with way(kernels), torch.autocast(model.device.type, torch.bfloat16):
        logits = model(**rows, use_cache=False).logits
        functional.cross_entropy(logits[keep].float(), labels[keep]).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(not bool(gradient.isfinite().all()) for gradient in gradients)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batches", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "masked_gradients.json")
    given = parser.parse_args()
    about = {"command": "benchmarks/masked_gradients.py", "cudnn": torch.backends.cudnn.version()}
    record: dict[str, Any] = about | {"runs": [provenance(given.device, seed=0)], "steps": {}}
    record["attention"] = {
        str(length): {name: of_attention(length, name, given.device) for name in WAYS} for length in LENGTHS
    }
    if given.model and given.batches:
        record["model"] = given.model.name
        model = AutoModelForSeq2SeqLM.from_pretrained(given.model).to(given.device).float()
        for step, (rows, labels) in torch.load(given.batches).items():
            moved = {key: value.to(given.device) for key, value in rows.items()}
            record["steps"][str(step)] = {
                name: of_batch(model, moved, labels.to(given.device), name) for name in WAYS
            }
    write_json(given.out, record)


if __name__ == "__main__":
    main()
