"""A checkpoint in the format of an engine, written by the engine's own converter.

What is added: refusals of what an engine is known not to run, config keys that a converter still expects, and the
proof that the engine's tokenizer gives the checkpoint's token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..checkpoints.atomic import write_text
from ..checkpoints.hf_config import known_config, load_config_json
from ..checkpoints.output import check_output, publish
from ..checkpoints.reader import MANIFEST
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from ..modeling import PREFIX
from ..results import Check, Result
from .engine_converters import llama_cpp_sources, require_converter, to_ct2, to_gguf, to_onnx
from .engine_tokenizers import check_ct2, check_gguf, check_onnx, sample_lines

Format = Literal["gguf", "ct2", "onnx"]
FORMATS: tuple[Format, ...] = ("gguf", "ct2", "onnx")
# Where the engine cannot hold fewer KV heads, or no tied head, whatever the converter writes.
NO_GROUPS = {"gguf": frozenset({"phi"})}
NO_TIED_HEAD = {"gguf": frozenset({"olmo2", "phi"})}
# Loaders that read another config than the one transformers writes.
OTHER_CONFIG = {"ct2": frozenset({"phi"})}
# Types whose loaders read longrope's factor for each rotary pair; wide heads need them in other types.
OWN_FACTORS = frozenset({"phi3", "phimoe", "phi4_multimodal"})


@dataclass
class ExportResult(Result):
    """What `export` did.

    Args:
        source, output: The checkpoint, and the folder of the result.
        to: The format.
        files: Of the result, relative to `output`.
        verification: Whether the engine's tokenizer reads as the checkpoint's.
    """

    command: ClassVar[str] = "export"
    source: str
    output: str
    to: str
    files: list[str] = field(default_factory=list)
    verification: list[Check] = field(default_factory=list)


def export(
    model: str | Path,
    out: str | Path,
    to: Format,
    *,
    precision: str | None = None,
    llama_cpp: str | Path | None = None,
    pre_tokenizer: str | None = None,
    text: str | Path | None = None,
    force: bool = False,
) -> ExportResult:
    """Write a checkpoint in the format of llama.cpp (`gguf`), CTranslate2 (`ct2`) or ONNX Runtime (`onnx`).

    Args:
        model: Folder of the checkpoint.
        out: Folder to make.
        to: The format.
        precision: As the engine's converter names it (`f16`, `q8_0`; `int8`, `float16`; `fp32`, `int4`); None
            for its default.
        llama_cpp: Folder of llama.cpp with its converter; None for the one that `LLAMA_CPP` names.
        pre_tokenizer: The name by which llama.cpp knows how the tokenizer splits text, where it does not know
            the tokenizer.
        text: File whose first hundred lines both tokenizers must read alike; None for built-in text.
        force: Replace an `out` that an earlier run of ours made.

    Returns:
        What was written and checked.

    Raises:
        UsageError: The converter is not there; the message says what to install.
        UnsupportedModelError: The engine lacks the architecture.
        CheckpointError: The converter failed, or the engine reads text otherwise; nothing is published.

    Example:
        >>> export("llama-gqa8", "llama-gguf", "gguf", precision="q8_0")  # doctest: +SKIP
    """
    if to not in FORMATS:
        raise UsageError(f"no format {to!r}", where="--to", fix=f"choose one of {', '.join(FORMATS)}")
    source, out = Path(model), Path(out)
    config = load_config_json(source)
    check_architecture(config, to)
    root = llama_cpp_sources(llama_cpp) if to == "gguf" else None
    require_converter(to)
    check_output(source, out, force)
    lines = sample_lines(text)
    with publish(out, force) as folder:
        if root is not None:
            file = folder / f"{source.name}.gguf"
            to_gguf(source, config, file, root, precision, pre_tokenizer)
            check = check_gguf(file, source, lines)
        elif to == "ct2":
            to_ct2(source, config, folder, precision)
            check = check_ct2(folder, source, lines)
        else:
            to_onnx(source, config, folder, precision)
            check = check_onnx(folder, source, lines)
        if check.ok is False:
            raise CheckpointError(
                check.detail, where=out, fix="give another --pre-tokenizer" if root else None
            )
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        result = ExportResult(str(model), str(out), to, files, [check])
        write_text(folder / MANIFEST, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return result


def check_architecture(config: Mapping[str, Any], to: str, where: object = None) -> None:
    """Refuse what the engine is known not to run, before anything is built.

    Args:
        config: Raw config of the checkpoint.
        to: The format.
        where: What the error names; None for the option.

    Raises:
        UnsupportedModelError: It names the architecture, and what to do instead.
    """
    model_type, where = str(config.get("model_type")), where or f"--to {to}"
    if model_type.startswith(PREFIX):
        raise UnsupportedModelError(
            f"{model_type} is a class of its own that runs in transformers only",
            where=where,
            fix="convert with --as, where a stock class can hold the heads (GPT-2: --groups 1)",
        )
    if model_type in OTHER_CONFIG.get(to, ()):
        raise UnsupportedModelError(
            f"the engine reads {model_type} only as its old remote code saved it",
            where=where,
            fix="use vLLM",
        )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if model_type in NO_GROUPS.get(to, ()) and kv_heads not in (None, heads):
        raise UnsupportedModelError(
            f"the engine's {model_type} has as many KV heads as query heads",
            where=where,
            fix="use vLLM",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "longrope" and model_type not in OWN_FACTORS:
        raise UnsupportedModelError(
            f"the engine's {model_type} does not read a factor for each rotary pair, which wide heads need",
            where=where,
            fix="convert without --wide",
        )
    tied = getattr(known_config(config), "tie_word_embeddings", False)
    if model_type in NO_TIED_HEAD.get(to, ()) and tied:
        raise UnsupportedModelError(
            f"the engine cannot load a {model_type} whose output head is the embedding",
            where=where,
            fix="convert with --untie",
        )
