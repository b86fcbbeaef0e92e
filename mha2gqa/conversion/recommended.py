"""Commands to type next: `convert` after `plan`, and how a result is held against its original."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..architectures import AttentionSpec
from ..checkpoints.hf_config import is_encoder_decoder
from ..config import ConvertConfig, PlanConfig, ReconstructConfig
from ..config.option import declared
from ..config.pair_options import PairConfig
from ..data.pairs import stock_type, trained_on
from ..data.prompts import ENGLISH_VOCABULARY, WHISPER

HELD_OUT = {"text": "HELDOUT.jsonl", "pairs": "HELDOUT_PAIRS.jsonl", "audio": "HELDOUT_RECORDINGS"}

CALIBRATION = {
    "text": "--calibration TEXT.jsonl",
    "pairs": "--calibration PAIRS.jsonl",
    "audio": "--calibration RECORDINGS --targets generate",
}

# Options that name the languages of pairs, by type: those of mBART and M2M100 (NLLB) are in no config.
LANGUAGES = {
    WHISPER: ("source_lang",),
    **dict.fromkeys(("m2m_100", "mbart"), ("source_lang", "target_lang")),
}


def convert_command(asked: PlanConfig, groups: int, spec: AttentionSpec, source: Mapping[str, Any]) -> str:
    """`convert` as it was planned, with data of the kind that the model was trained on, where that can be read.

    Args:
        asked: Of `plan`: what differs from its defaults is repeated.
        groups: KV heads G.
        spec: Of the source.
        source: Its raw config.
    """
    name = str(asked.source)
    out = f"{Path(name).name}-gqa{groups}" + (f"-wide{asked.wide}" if asked.wide > 1 else "")
    words = ["mha2gqa", "convert", name, out, "--groups", str(groups)]
    words += ["--wide", str(asked.wide)] if asked.wide > 1 else []
    if not (spec.unread or spec.uncalibrated):
        words += [*CALIBRATION[trained_on(source)].split(), *_languages(source, {})]
    words += [] if asked.as_ == "auto" else ["--as", asked.as_]
    changed, options = asked.changed(), declared(ConvertConfig)
    words += [options["allow_unchecked"].flags[0]] if asked.allow_unchecked else []
    for option in ("revision", "drop_extra", "calibration_tokens", "effort"):
        values = changed.get(option, ())
        for value in values if isinstance(values, tuple) else (values,):
            words += [options[option].flags[0], str(value)]
    for key, value in asked.fit.changed().items() if isinstance(asked.fit, ReconstructConfig) else ():
        words += ["--fit", f"{key}={json.dumps(value) if isinstance(value, (bool, tuple)) else value}"]
    return shlex.join(words)


def next_command(options: ConvertConfig, source: Mapping[str, Any], scored: bool = True) -> str:
    """`evaluate` of original and result, on data of the kind that the model is scored on.

    Args:
        options: Of the conversion: those that say how pairs are read are repeated.
        source: Raw config of the source.
        scored: Whether there is data that such a model is scored on; without, `verify` is all there is.

    Example:
        >>> next_command(ConvertConfig("whisper", "small", 4), {"model_type": "whisper", "is_encoder_decoder": True})
        'mha2gqa evaluate whisper small --data HELDOUT_RECORDINGS --source-lang LANGUAGE'
    """
    if not scored:
        return shlex.join(["mha2gqa", "verify", options.out, "--against", options.source, "--full"])
    changed = {name: value for name, value in options.changed().items() if name in declared(PairConfig)}
    kind = trained_on(source)
    if kind == "text" and changed and is_encoder_decoder(source):  # a T5, converted for pairs
        kind = "pairs"
    words = ["mha2gqa", "evaluate", options.source, options.out, "--data", HELD_OUT[kind]]
    for name, item in declared(PairConfig).items():
        if name in changed:
            value = changed[name]
            words += [item.flags[0], ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join([*words, *_languages(source, changed)])


def _languages(source: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Places for the languages that pairs of a model cannot be read without, where they are not given.

    Args:
        source: Its raw config.
        given: Options of pairs that are given.
    """
    kind = stock_type(source)
    needed = LANGUAGES.get(kind, ())
    if kind == WHISPER and source.get("vocab_size") == ENGLISH_VOCABULARY:
        needed = ()
    options = declared(PairConfig)
    return [word for name in needed if name not in given for word in (options[name].flags[0], "LANGUAGE")]
