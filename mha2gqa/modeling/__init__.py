"""Modelling code that travels with a checkpoint whose stock class has no KV-head count.

The files `modeling_gqa_*.py` beside this one are self-contained and copied as they are; this module only
says which file and which class a checkpoint needs, and what its config.json must hold for
`AutoModelFor….from_pretrained(OUT, trust_remote_code=True)` to find them. No torch here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModelError

PREFIX = "gqa_"  # model_type of an exported checkpoint: never a stock one, which would load silently


@dataclass(frozen=True)
class Export:
    """The modelling code of one stock model type.

    Args:
        file: Modelling file in this folder.
        config: Its config class.
        model: Its model class.
        auto: The auto class that loads it.
        stock: Values of `architectures` it can hold; the first is the class it extends. Base models
            (`BartModel`) load into it as they do into the stock class.
        tokenizer: Class to name in config.json where tokenizer_config.json names none: transformers
            would infer it from a stock model type.
        cross: Whether it has cross-attention.
        kv_keys: Config keys of the KV heads of self-attention and of cross-attention.
        within: Keys that lead to the config that holds these, where the decoder is a part with its own.
        part: Classes of that part alone: ours, and the stock one it extends.
        since: The first transformers that it runs with.
    """

    file: str
    config: str
    model: str
    auto: str
    stock: tuple[str, ...]
    tokenizer: str
    cross: bool = True
    kv_keys: tuple[str, str] = ("num_key_value_heads", "num_cross_key_value_heads")
    within: tuple[str, ...] = ()
    part: tuple[str, str] | None = None
    since: str = "4.57"


def _t5(name: str, *more: str) -> Export:
    stock = (f"{name}ForConditionalGeneration", f"{name}Model", *more)
    return Export(
        "modeling_gqa_t5.py",
        f"Gqa{name}Config",
        f"Gqa{name}ForConditionalGeneration",
        "AutoModelForSeq2SeqLM",
        stock,
        "T5Tokenizer",
    )


def _bart(name: str, tokenizer: str, model: str = "ForConditionalGeneration") -> Export:
    return Export(
        "modeling_gqa_bart.py",
        f"Gqa{name}Config",
        f"Gqa{name}{model}",
        "AutoModelForSpeechSeq2Seq" if name == "Whisper" else "AutoModelForSeq2SeqLM",
        (f"{name}{model}", f"{name}Model"),
        tokenizer,
    )


def _decoder(file: str, name: str, model: str, tokenizer: str) -> Export:
    config, stock = f"Gqa{name}Config", (f"{name}{model}", f"{name}Model")
    return Export(file, config, f"Gqa{name}{model}", "AutoModelForCausalLM", stock, tokenizer, cross=False)


EXPORTS: dict[str, Export] = {
    "t5": _t5("T5", "T5WithLMHeadModel"),
    "mt5": _t5("MT5"),
    "umt5": _t5("UMT5"),
    "bart": _bart("Bart", "RobertaTokenizer"),
    "mbart": _bart("MBart", "MBartTokenizer"),
    "pegasus": _bart("Pegasus", "PegasusTokenizer"),
    "marian": _bart("Marian", "MarianTokenizer", "MTModel"),
    "m2m_100": _bart("M2M100", "M2M100Tokenizer"),
    "whisper": _bart("Whisper", "WhisperTokenizer"),
    "moonshine": Export(
        "modeling_gqa_moonshine.py",
        "GqaMoonshineConfig",
        "GqaMoonshineForConditionalGeneration",
        "AutoModelForSpeechSeq2Seq",
        ("MoonshineForConditionalGeneration", "MoonshineModel"),
        "PreTrainedTokenizerFast",
        kv_keys=("decoder_num_key_value_heads", "num_cross_key_value_heads"),
    ),
    "moonshine_streaming": Export(
        "modeling_gqa_moonshine_streaming.py",
        "GqaMoonshineStreamingConfig",
        "GqaMoonshineStreamingForConditionalGeneration",
        "AutoModelForSpeechSeq2Seq",
        ("MoonshineStreamingForConditionalGeneration", "MoonshineStreamingModel"),
        "PreTrainedTokenizerFast",
        since="5.17",
    ),
    "musicgen": Export(
        "modeling_gqa_musicgen.py",
        "GqaMusicgenConfig",
        "GqaMusicgenForConditionalGeneration",
        "AutoModelForTextToWaveform",
        ("MusicgenForConditionalGeneration",),
        "T5Tokenizer",
        within=("decoder",),
        part=("GqaMusicgenForCausalLM", "MusicgenForCausalLM"),
    ),
    "musicgen_melody": Export(
        "modeling_gqa_musicgen.py",
        "GqaMusicgenMelodyConfig",
        "GqaMusicgenMelodyForConditionalGeneration",
        "AutoModelForTextToWaveform",
        ("MusicgenMelodyForConditionalGeneration",),
        "T5Tokenizer",
        cross=False,
        within=("decoder",),
        part=("GqaMusicgenMelodyForCausalLM", "MusicgenMelodyForCausalLM"),
    ),
    "gpt2": _decoder("modeling_gqa_gpt2.py", "GPT2", "LMHeadModel", "GPT2Tokenizer"),
    "opt": _decoder("modeling_gqa_gpt2.py", "OPT", "ForCausalLM", "GPT2Tokenizer"),
    "gpt_neo": _decoder("modeling_gqa_gpt_neo.py", "GPTNeo", "ForCausalLM", "GPT2Tokenizer"),
    "biogpt": _decoder("modeling_gqa_gpt_neo.py", "BioGpt", "ForCausalLM", "BioGptTokenizer"),
    "bloom": _decoder("modeling_gqa_alibi.py", "Bloom", "ForCausalLM", "PreTrainedTokenizerFast"),
    "mpt": _decoder("modeling_gqa_alibi.py", "Mpt", "ForCausalLM", "GPTNeoXTokenizer"),
}


def refuse_encoder(config: Mapping[str, Any]) -> None:
    """Refuse the encoder of an encoder-decoder, saved on its own.

    Raises:
        UnsupportedModelError: The raw config names such a class.
    """
    for name in config.get("architectures") or ():
        if name.endswith("EncoderModel"):
            raise UnsupportedModelError(
                f"{name} is an encoder alone: it has no decoder attention and no KV cache",
                where="config.json",
                fix="take the full encoder-decoder checkpoint",
            )


def find_export(config: Mapping[str, Any]) -> Export | None:
    """What a checkpoint with this raw config becomes, or None where transformers has a KV-head count.

    Raises:
        UnsupportedModelError: The checkpoint holds a class that the exported one cannot stand for.

    Example:
        >>> find_export({"model_type": "t5"}).model
        'GqaT5ForConditionalGeneration'
    """
    model_type = str(config.get("model_type"))
    export = EXPORTS.get(model_type.removeprefix(PREFIX))
    if export is None:
        return None
    refuse_encoder(config)
    where = "config.json"
    for name in config.get("architectures") or ():
        if name not in (*export.stock, export.model):
            raise UnsupportedModelError(
                f"{name} has another head than {export.stock[0]}, which the exported class would drop",
                where=where,
                fix=f"convert a {export.stock[0]} checkpoint",
            )
    if config.get("is_encoder_decoder") is False and export.cross:
        raise UnsupportedModelError(
            "is_encoder_decoder is false: this checkpoint is one half of the model",
            where=where,
            fix="convert the full encoder-decoder checkpoint",
        )
    if config.get("reorder_and_upcast_attn"):
        raise UnsupportedModelError(
            "reorder_and_upcast_attn is not available with shared heads",
            where=where,
            fix="set it to false: it only changes the order of rounding",
        )
    return export


def config_changes(
    config: Mapping[str, Any], num_kv_heads: Mapping[str, int], has_head: bool = False
) -> dict[tuple[str, ...], Any]:
    """Keys of config.json that make the checkpoint load the exported class.

    Args:
        config: The raw config of the source (stock or already exported).
        num_kv_heads: KV heads by kind of attention: `self`, and `cross` where there is cross-attention.
        has_head: Whether an output head is stored.

    Returns:
        Path -> value, as `architectures.config_changes` gives them.

    Example:
        >>> config_changes({"model_type": "opt"}, {"self": 4})[("model_type",)]
        'gqa_opt'
    """
    export = find_export(config)
    assert export is not None, config.get("model_type")
    module = export.file.removesuffix(".py")
    changes: dict[str, Any] = {
        "model_type": PREFIX + str(config["model_type"]).removeprefix(PREFIX),
        "architectures": [export.model],
        "auto_map": {"AutoConfig": f"{module}.{export.config}", export.auto: f"{module}.{export.model}"},
    }
    counts = {export.kv_keys[0]: num_kv_heads["self"]}
    if export.cross:
        counts[export.kv_keys[1]] = num_kv_heads["cross"]
    if export.file == "modeling_gqa_t5.py" and has_head and not _scales_outputs(config):
        changes["tie_word_embeddings"] = False  # how transformers 4 says both
    inside = {(*export.within, key): value for key, value in counts.items()}
    return {(key,): value for key, value in changes.items()} | inside


def _scales_outputs(config: Mapping[str, Any]) -> bool:
    """Whether a model of the T5 family scales its decoder's outputs before the head, as transformers 5 says it."""
    mt5 = str(config["model_type"]).removeprefix(PREFIX) == "mt5"
    return not mt5 and config.get("scale_decoder_outputs", True)


def modeling_file(export: Export) -> Path:
    """The file to copy beside the weights."""
    return Path(__file__).with_name(export.file)


def exported_class(config: Mapping[str, Any]) -> Any:
    """The model class of an exported config, from this package; None if the config is not exported."""
    if not str(config.get("model_type")).startswith(PREFIX):
        return None
    export = find_export(config)
    if export is None:
        return None
    module = importlib.import_module(f".{export.file.removesuffix('.py')}", __name__)
    return getattr(module, export.model)


def part_class(config: Mapping[str, Any]) -> Any:
    """The class of the decoder alone, where it is a part of the model with a config of its own; else None."""
    export = find_export(config)
    if export is None or export.part is None:
        return None
    ours, stock = export.part
    if (whole := exported_class(config)) is not None:
        return getattr(importlib.import_module(whole.__module__), ours)
    import transformers

    return getattr(transformers, stock)


def register(config: Mapping[str, Any]) -> None:
    """Let the auto classes load an exported checkpoint with this package's own copy of its code.

    No consent to remote code is needed then: what runs is the installed package. Models loaded so carry
    their modelling file along when they are saved. Nothing happens for any other config.
    """
    model_class = exported_class(config)
    if model_class is None:
        return
    import transformers

    config_class = model_class.config_class
    export = EXPORTS[str(config["model_type"]).removeprefix(PREFIX)]
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    getattr(transformers, export.auto).register(config_class, model_class, exist_ok=True)
    config_class.register_for_auto_class()
    model_class.register_for_auto_class(export.auto)
