"""Published pretraining token counts of public families, each with its source."""

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

# The first match wins, so narrower patterns stand above wider ones. Where later training stages are published
# they are counted; a checkpoint that is only an average of runs counts what its source adds up.
PRETRAINING: tuple[Pretraining, ...] = (
    Pretraining(
        r"code-?llama-?70b", 3 * T, "arXiv:2308.12950, sections 2.2 and 2.6 (2T of Llama 2, 1T of code)"
    ),
    Pretraining(
        r"code-?llama.*python", 2_600 * B, "arXiv:2308.12950, table 1 (2T of Llama 2, 500B and 100B of code)"
    ),
    Pretraining(r"code-?llama", 2_500 * B, "arXiv:2308.12950, table 1 (2T of Llama 2, 500B of code)"),
    Pretraining(r"llama-?2", 2 * T, "arXiv:2307.09288, section 2.1 and table 1"),
    Pretraining(r"open[-_]?llama", 1 * T, "model cards of openlm-research/open_llama_3b, _7b and _13b"),
    Pretraining(r"\bllama-?(30|33|65)b", 1_400 * B, "arXiv:2302.13971, figure 1 and table 2"),
    Pretraining(r"\bllama-?(1-)?(7|13)b", 1 * T, "arXiv:2302.13971, figure 1 and table 2"),
    Pretraining(r"\bamber\b", 1_259 * B, "table of data of github.com/LLM360/amber-train (1259.13B)"),
    Pretraining(r"pythia", 299_892_736_000, "model cards of EleutherAI/pythia (143,000 steps of 2,097,152)"),
    Pretraining(r"gpt-neox-20b", 472 * B, "arXiv:2204.06745 (150,000 steps of 1,538 contexts of 2,048)"),
    Pretraining(r"gpt-j-6b", 402 * B, "model card of EleutherAI/gpt-j-6b, training procedure"),
    Pretraining(
        r"olmo-?2.*13b", 5_600 * B, "OLMo 2 release notes (5T; anneals of 3 x 100B and 300B averaged)"
    ),
    Pretraining(
        r"olmo-?2.*7b", 4_050 * B, "OLMo 2 release notes (4T; three orders of the same 50B averaged)"
    ),
    Pretraining(r"olmo-7b-twin-2t", 2 * T, "model card of allenai/OLMo-7B-Twin-2T"),
    Pretraining(
        r"olmo-7b(?!-0[47]24)", 2_460 * B, "arXiv:2402.00838, table 1; card of allenai/OLMo-7B (2.5T)"
    ),
    Pretraining(r"olmo-1b(?!-0724)", 3 * T, "model card of allenai/OLMo-1B"),
    Pretraining(r"phi-?1[._]5", 150 * B, "model card of microsoft/phi-1_5"),
    Pretraining(r"phi-?2\b", 1_400 * B, "model card of microsoft/phi-2"),
    Pretraining(r"phi-?3-mini", 4_900 * B, "model card of microsoft/Phi-3-mini-4k-instruct, June 2024"),
    Pretraining(r"stablelm-3b-4e1t", 4 * T, "model card of stabilityai/stablelm-3b-4e1t (1T, four epochs)"),
    Pretraining(r"stablelm-2-1[._]6b", 2 * T, "model card of stabilityai/stablelm-2-1_6b"),
    Pretraining(r"qwen1[._]5", 3 * T, "arXiv:2407.10671, section 3.1 (names 3T for Qwen1.5)"),
    Pretraining(r"qwen-(14|72)b", 3 * T, "table of models of github.com/QwenLM/Qwen"),
    Pretraining(r"qwen-7b", 2_400 * B, "table of models of github.com/QwenLM/Qwen"),
    Pretraining(r"qwen-1[._]8b", 2_200 * B, "table of models of github.com/QwenLM/Qwen"),
    Pretraining(r"\bgemma-7b", 6 * T, "arXiv:2403.08295, section Training Data"),
    Pretraining(r"smollm2-1[._]7b", 11 * T, "arXiv:2502.02737, section 4"),
    Pretraining(r"smollm-1[._]7b", 1 * T, "huggingface.co/blog/smollm"),
    Pretraining(r"deepseek-llm-(7|67)b", 2 * T, "arXiv:2401.02954, abstract"),
    Pretraining(
        r"deepseek-coder-(1[._]3|6[._]7|33)b", 2 * T, "github.com/deepseek-ai/DeepSeek-Coder (1.8T and 200B)"
    ),
    Pretraining(r"baichuan2", 2_600 * B, "arXiv:2309.10305, abstract"),
    Pretraining(r"mpt-(7|30)b", 1 * T, "mosaicml.com/blog/mpt-7b and mpt-30b"),
    Pretraining(r"falcon-rw-1b", 350 * B, "model card of tiiuae/falcon-rw-1b"),
    Pretraining(r"bloom\b(?!-)", 366 * B, "arXiv:2211.05100, table 3"),
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
