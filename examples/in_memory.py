"""Convert a model that is already in memory, and let it speak with a cache a quarter of the size.

    python examples/in_memory.py

Nothing is written: `convert_model` returns a working model of the same class and leaves the given one alone.
"""

from __future__ import annotations

import torch

from mha2gqa import convert_model
from mha2gqa.assets import tiny_model_path
from mha2gqa.checkpoints.loading import load_model, load_tokenizer

PROMPT = "def read(path):\n    with open(path) as"


def cache_numbers(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """How many numbers the KV cache holds after reading `ids` `[1, T]`."""
    cache = model(input_ids=ids, use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


@torch.inference_mode()
def main() -> None:
    """Show the same prompt continued by 8 KV heads and by 2."""
    original = load_model(tiny_model_path(), dtype="float32", device="cpu")
    tokenizer = load_tokenizer(tiny_model_path())
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for model in (original, convert_model(original, 2, method="joint")):
        words = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        print(f"{model.config.num_key_value_heads} KV heads, {cache_numbers(model, ids):,} numbers cached:")
        print(tokenizer.decode(words[0]), end="\n\n")


if __name__ == "__main__":
    main()
