"""model_type -> the stock architecture that computes the same and can hold fewer KV heads. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """One way to write a model as another architecture.

    Args:
        target: Model type of the result.
        auto: Whether `--as auto` takes it; else it must be named.
        only_mqa: Whether the target can hold all KV heads or one, nothing between.
        when: What must hold of the source, in words.
    """

    target: str
    auto: bool = True
    only_mqa: bool = False
    when: str = ""


_GPT2 = (Route("gpt_bigcode", only_mqa=True),)

ARCH_CONVERSIONS: dict[str, tuple[Route, ...]] = {
    "gpt_neox": (
        Route("phi", when="use_parallel_residual"),
        Route("nemotron", when="not use_parallel_residual"),
    ),
    "gptj": (Route("phi"),),
    "codegen": (Route("phi"),),
    "gpt2": _GPT2,
    "gpt-sw3": _GPT2,
    "opt": (Route("gpt_bigcode", only_mqa=True, when="do_layer_norm_before, no word_embed_proj"),),
    # transformers caches every query head of this form: parameters shrink, the cache does not.
    "falcon": (Route("falcon", auto=False, when="all KV heads, parallel_attn"),),
    # Their own code cannot hold fewer KV heads; the weights fit a stock class.
    "baichuan": (Route("llama", auto=False, when="the 7B models: RoPE, not ALiBi"),),
    "deepseek": (Route("qwen2_moe", auto=False, when="softmax router, shared experts"),),
    "internlm": (Route("llama", auto=False),),
    "internlm2": (Route("llama", auto=False),),
    "qwen": (Route("qwen2", auto=False),),
}


def differs_for_mqa(model_type: str) -> bool:
    """Whether such a model becomes another class with one KV head, but stays what it is with several.

    Moments are those of the class that is run: one KV head and several cannot share them.
    """
    return any(route.only_mqa for route in ARCH_CONVERSIONS.get(model_type, ()))
