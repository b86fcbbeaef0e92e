"""Published pretraining token counts of public families, each with the place where it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Pretraining:
    """What is published about a family's pretraining.

    Args:
        pattern: Regular expression, searched case-insensitively in a hub id or folder name.
        tokens: Pretraining tokens.
        source: Where the number stands.
    """

    pattern: str
    tokens: int
    source: str


T, B = 10**12, 10**9

# The first match wins, so narrower patterns stand above wider ones.
PRETRAINING: tuple[Pretraining, ...] = (
    Pretraining(r"code-?llama", 2_500 * B, "arXiv:2308.12950 (2T of Llama 2 and 500B of code)"),
    Pretraining(r"llama-?2", 2 * T, "arXiv:2307.09288, table 1"),
    Pretraining(r"open[-_]?llama", 1 * T, "model card of openlm-research/open_llama"),
    Pretraining(r"\bllama-?(30|33|65)b", 1_400 * B, "arXiv:2302.13971, table 2"),
    Pretraining(r"\bllama-?(1-)?(7|13)b", 1 * T, "arXiv:2302.13971, table 2"),
    Pretraining(r"\bamber\b", 1_259 * B, "arXiv:2312.06550"),
    Pretraining(r"pythia", 299_892_736_000, "arXiv:2304.01373 (143,000 steps of 2,097,152 tokens)"),
    Pretraining(r"gpt-neox-20b", 472 * B, "arXiv:2204.06745 (150,000 steps of 3.15M tokens)"),
    Pretraining(r"gpt-j-6b", 402 * B, "model card of EleutherAI/gpt-j-6b"),
    Pretraining(r"olmoe", 5_133 * B, "arXiv:2409.02060"),
    Pretraining(r"olmo-?2.*13b", 5_600 * B, "arXiv:2501.00656"),
    Pretraining(r"olmo-?2.*7b", 4_050 * B, "arXiv:2501.00656"),
    Pretraining(r"olmo-7b", 2_460 * B, "arXiv:2402.00838, table 1"),
    Pretraining(r"olmo-1b", 2 * T, "arXiv:2402.00838, table 1"),
    Pretraining(r"phi-?1[._]5", 150 * B, "arXiv:2309.05463"),
    Pretraining(r"phi-?2\b", 1_400 * B, "model card of microsoft/phi-2"),
    Pretraining(r"phi-?3-mini", 3_300 * B, "arXiv:2404.14219"),
    Pretraining(r"stablelm-3b-4e1t", 4 * T, "model card of stabilityai/stablelm-3b-4e1t"),
    Pretraining(r"stablelm-2-1[._]6b", 2 * T, "arXiv:2402.17834"),
    Pretraining(r"qwen1[._]5", 3 * T, "arXiv:2407.10671 (names 3T for Qwen1.5)"),
    Pretraining(r"qwen-14b", 3 * T, "arXiv:2309.16609, table 1"),
    Pretraining(r"qwen-7b", 2_400 * B, "arXiv:2309.16609, table 1"),
    Pretraining(r"qwen-1[._]8b", 2_200 * B, "arXiv:2309.16609, table 1"),
    Pretraining(r"\bgemma-7b", 6 * T, "arXiv:2403.08295"),
    Pretraining(r"smollm2-1[._]7b", 11 * T, "arXiv:2502.02737"),
    Pretraining(r"smollm-1[._]7b", 1 * T, "model card of HuggingFaceTB/SmolLM-1.7B"),
    Pretraining(r"deepseek-(llm|coder)", 2 * T, "arXiv:2401.02954, arXiv:2401.14196"),
    Pretraining(r"baichuan2", 2_600 * B, "arXiv:2309.10305"),
    Pretraining(r"mpt-(7|30)b", 1 * T, "model card of mosaicml/mpt-7b"),
    Pretraining(r"falcon-rw-1b", 350 * B, "model card of tiiuae/falcon-rw-1b"),
    Pretraining(r"bloom\b(?!-)", 366 * B, "arXiv:2211.05100"),
    Pretraining(r"\bt5-(v1|small|base|large|3b|11b)", 1 * T, "arXiv:1910.10683, section 3.7"),
)


def known_pretraining(name: str | None) -> Pretraining | None:
    """The published pretraining of a model, by hub id or folder name.

    Example:
        >>> known_pretraining("meta-llama/Llama-2-7b-hf").tokens
        2000000000000
    """
    if not name:
        return None
    return next((known for known in PRETRAINING if re.search(known.pattern, name, re.IGNORECASE)), None)
