"""model_type -> why fewer KV heads are impossible there. Data only."""

from __future__ import annotations

_MLA = (
    "multi-head latent attention: keys and values are rebuilt from one shared latent, so the cache is "
    "small already and num_key_value_heads means nothing"
)
_RECURRENT = "a state-space or recurrent model: it has no attention and so no KV cache"
_ENCODER = "an encoder with a language-model head: its class has no KV-head setting, and no KV cache"
_IGNORES = "its transformers class ignores num_key_value_heads: every head keeps its own keys and values"
_TEXT_IGNORES = "its text model's class has no KV-head setting"
_PAIR = "a pair of two other models: convert the decoder on its own if its type is supported"
_DRAFTER = "a drafter that reads the KV cache of its target model and has none of its own"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _MLA: (
        "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
        "dots3_note", "dots3_note_text", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl",
        "kimi_k25", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "sarvam_mla",
        "youtu",
    ),
    _RECURRENT: ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    _ENCODER: (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
        "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    _IGNORES: (
        "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "ctrl",
        "fsmt", "git", "gpt_neox_japanese", "hrm_text", "led", "longt5", 
        "modernbert-decoder", "mvp", "nllb-moe",
        "openai-gpt", "pegasus_x", "persimmon", "plbart", "prophetnet", "seamless_m4t",
        "seamless_m4t_v2", "speech_to_text", "speecht5", "switch_transformers", "trocr", "udop",
        "xglm", "xlnet", "idefics", "pop2piano",
    ),
    _TEXT_IGNORES + " (OPT)": ("blip-2", "instructblip", "instructblipvideo"),
    _TEXT_IGNORES + " (BERT-like)": ("blip", "pix2struct"),
    _TEXT_IGNORES + " (BART-like)": ("florence2", "kosmos-2", "kosmos-2.5", "pp_formulanet"),
    _TEXT_IGNORES + " (Persimmon)": ("fuyu",),
    _PAIR: ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"),
    _DRAFTER: ("gemma4_assistant", "gemma4_unified_assistant"),
}  # fmt: skip

REFUSED: dict[str, str] = {
    **{name: reason for reason, names in _BY_REASON.items() for name in names},
    "jetmoe": (
        "its query heads are experts: their number is num_key_value_heads x num_experts_per_tok, so fewer "
        "KV heads would also take query heads away"
    ),
    "zaya": (
        "its keys are mixed with the queries of their own group before attention, so a shared key head cannot "
        "equal the heads it stands for"
    ),
    "reformer": "hashed attention shares one projection between queries and keys",
}
