"""A LLaVA whose text model is a trained reference; its small vision tower is random.    python make_llava.py REF OUT"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=AutoConfig.from_pretrained(source), image_token_index=3,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(out)
    for path in source.glob("*token*"):
        shutil.copyfile(path, out / path.name)


main()
