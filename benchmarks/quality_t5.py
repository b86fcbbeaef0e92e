"""The quality table of an encoder-decoder: T5's span corruption instead of next-token prediction.

    python benchmarks/quality_t5.py --model ref-t5-6m --train CORPUS --valid VALID.jsonl
    python benchmarks/quality_t5.py … --stages tune uptrain --groups 2 --budget-seconds 500

Rows, options and hygiene are those of quality.py. Decoder self- and cross-attention are shared, the
encoder stays. Blocks are 284 tokens of text (256 encoder ids, 58 targets, all of them scored, block i always
corrupted alike). The defaults are those of the reference T5: batches of 256 blocks, 262M tokens of
pretraining, so alpha 0.05 is 180 steps. It had not converged: judge uptrained rows by `original+ce`, the
original continued on the same tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import quality
import torch
from _common import RESULTS
from _quality_rows import Shape
from torch.nn import functional as F

from mha2gqa.architectures import find_attention_modules, find_spec
from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_tokenizer
from mha2gqa.data import span_corruption

WINDOW = 284


class SpanBench(quality.Bench):
    """One T5 and one corpus."""

    protocol_name = "span-corruption"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        config = load_config_json(args.model)
        self.corruption = span_corruption(load_tokenizer(args.model), config, args.window)

    def protocol(self) -> dict[str, Any]:
        """As for decoders; tokens are targets."""
        known = super().protocol()
        return known | {"tokens": known["blocks"] * self.corruption.target_length}

    @torch.inference_mode()
    def score(self, model: Any, blocks: torch.Tensor) -> float:
        """Nats per target of a model on blocks `[N, T + 1]`, whose last column is not used."""
        total, size = 0.0, self.args.eval_batch
        for start in range(0, len(blocks), size):
            rows = blocks[start : start + size, :-1].numpy()
            encoder, targets = self.corruption(rows, range(start, start + len(rows)))
            read, said, wanted = (
                torch.from_numpy(x).to(self.device)
                for x in (encoder, self.corruption.decoder_inputs(targets), targets)
            )
            logits = model(input_ids=read, decoder_input_ids=said, use_cache=False).logits
            total += F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="sum").item()
        return total / (len(blocks) * self.corruption.target_length)

    def shape_of(self, model: Any) -> Shape:
        """Costs per token of text: the encoder sees some of them, the decoder the others."""
        window = self.args.window
        read, said = self.corruption.encoder_length, self.corruption.target_length
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() >= 2}
        head = model.get_output_embeddings().weight.numel()
        parts = {
            part: sum(n for name, n in sizes.items() if name.startswith(part) and "embed" not in name)
            for part in ("encoder", "decoder")
        }
        state = model.state_dict()
        shared = sum(
            state[name].numel() * (read if module.kind == "cross" and role[0] in "kv" else said)
            for module in find_attention_modules(find_spec(model.config.to_dict()), state)
            for role, name in module.names.items()
            if state[name].dim() >= 2 and role.endswith(".weight")
        )
        config = model.config
        width = config.num_heads * config.d_kv
        square = config.num_layers * read**2 + config.num_decoder_layers * said * (said + read)
        return Shape(
            round((parts["encoder"] * read + (parts["decoder"] + head) * said) / window),
            round(shared / window),
            round(2 * width * square / window**2),  # `Shape` counts causal windows: half the square
            round(head * said / window),
        )


if __name__ == "__main__":
    quality.run(
        quality.parse_args(
            description=__doc__,
            out=RESULTS / "quality-t5.json",
            window=WINDOW,
            groups=[4, 2, 1],
            seeds=[0],
            alphas=[0.05],
            original_tokens=3605 * 256 * WINDOW,
            batch_tokens=256 * WINDOW,
        ),
        SpanBench,
    )
