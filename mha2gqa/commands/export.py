"""A checkpoint in the format of an engine, by the engine's own converter; nothing of theirs is done again here.

What is added are the traps: config keys that a converter still expects, tied output heads that an engine cannot
load, and the proof that the engine's tokenizer reads as the checkpoint's does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..assets import heldout_path
from ..checkpoints.atomic import write_text
from ..checkpoints.config_spelling import both_spellings
from ..checkpoints.hf_config import known_config, load_config_json
from ..checkpoints.loading import load_tokenizer
from ..checkpoints.output import check_output, publish
from ..checkpoints.reader import MANIFEST
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from ..modeling import PREFIX
from ..results import Result
from ..verification.tiny_random import Check

Format = Literal["gguf", "ct2", "onnx"]
FORMATS: tuple[Format, ...] = ("gguf", "ct2", "onnx")
LINES = 100
PRE_TOKENIZERS = "gpt-2, llama-bpe, qwen2"
# Where the engine cannot hold fewer KV heads, or no tied head, whatever the converter writes.
NO_GROUPS = {"gguf": frozenset({"phi"})}
NO_TIED_HEAD = {"gguf": frozenset({"olmo2", "phi"})}
# Loaders that read another config than the one transformers writes.
OTHER_CONFIG = {"ct2": frozenset({"phi"})}
# Types whose loaders read longrope's factor for each rotary pair; wide heads need them in other types.
OWN_FACTORS = frozenset({"phi3", "phimoe", "phi4_multimodal"})
PACKAGES = {"ct2": "ctranslate2", "onnx": "onnxruntime_genai"}
# The converter refuses tokenizers that are not on its list; the user's word is taken instead.
RUN_GGUF = """
import runpy, sys
root, name = sys.argv[1:3]
sys.path[:0] = [root + "/gguf-py", root]
if name:
    try:
        import conversion.base as base
    except ImportError:
        sys.exit("--pre-tokenizer needs a llama.cpp whose converter is a package of its own")
    for c in [c for c in vars(base).values() if isinstance(c, type)]:
        if "get_vocab_base_pre" in vars(c):
            c.get_vocab_base_pre = lambda self, tokenizer: name
sys.argv = [root + "/convert_hf_to_gguf.py", *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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
    if to in PACKAGES:
        _require(PACKAGES[to])
    check_output(source, out, force)
    lines = sample_lines(text)
    with publish(out, force) as folder:
        with staged(source, config) as staging:
            if to == "gguf":
                _gguf(staging, folder / f"{source.name}.gguf", root, precision, pre_tokenizer)
                check = _check_gguf(folder / f"{source.name}.gguf", source, lines)
            elif to == "ct2":
                _ct2(staging, folder, precision)
                check = _check_ct2(folder, source, lines)
            else:
                _onnx(staging, folder, precision)
                check = _check_onnx(folder, source, lines)
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


def sample_lines(text: str | Path | None = None) -> list[str]:
    """A hundred lines to tokenize: of a file, or of the text that comes with the package."""
    path = Path(text) if text else heldout_path()
    with path.open(encoding="utf-8") as file:
        raw = [line for _, line in zip(range(4 * LINES), file, strict=False)]
    if path.suffix == ".jsonl":
        raw = [part for line in raw for part in json.loads(line)["text"].splitlines()]
    return [line.rstrip("\n") for line in raw if line.strip()][:LINES]


@contextmanager
def staged(source: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """The checkpoint by links, its config with the older keys that converters still read."""
    new = both_spellings(config)
    if "n_positions" in new:
        new.setdefault("n_ctx", new["n_positions"])
    with tempfile.TemporaryDirectory(prefix="mha2gqa-export-") as name:
        folder = Path(name) / source.resolve().name
        folder.mkdir()
        for path in source.resolve().iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
        (folder / "config.json").write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
        yield folder


def write_gguf(
    source: Path,
    config: Mapping[str, Any],
    file: Path,
    root: Path,
    precision: str,
    pre_tokenizer: str | None = None,
) -> None:
    """One .gguf file of a checkpoint, its tokenizer unchecked.

    Args:
        source, config: The checkpoint and its raw config.
        file: To write.
        root: Sources of llama.cpp.
        precision, pre_tokenizer: As in `export`.

    Raises:
        UnsupportedModelError: The converter knows neither the architecture nor the tokenizer.
        CheckpointError: It failed.
    """
    with staged(source, config) as staging:
        _gguf(staging, file, root, precision, pre_tokenizer)


def supported_architectures(root: Path) -> set[str]:
    """Classes that llama.cpp's converter lists; none where it does not say.

    Args:
        root: Sources of llama.cpp.
    """
    command = [sys.executable, "-c", RUN_GGUF, str(root), "", "--print-supported-models"]
    done = subprocess.run(command, capture_output=True, text=True)
    return set(re.findall(r"- (\w+)$", done.stdout + done.stderr, re.M)) if not done.returncode else set()


def llama_cpp_sources(folder: str | Path | None, where: str = "--to gguf") -> Path:
    """Sources of llama.cpp that hold its converter.

    Args:
        folder: As given; None for the folder that `LLAMA_CPP` names.
        where: What the error names.

    Raises:
        UsageError: There are none; with what to do.
    """
    named = folder or os.environ.get("LLAMA_CPP")
    if not named:
        raise UsageError(
            "the converter of llama.cpp is needed, which is in no package",
            where=where,
            fix="clone llama.cpp and give its folder by --llama-cpp or LLAMA_CPP; pip install gguf sentencepiece",
        )
    root = Path(named).resolve()
    if not (root / "convert_hf_to_gguf.py").is_file():
        raise UsageError(
            "no convert_hf_to_gguf.py there", where=root, fix="give the folder of llama.cpp's sources"
        )
    return root


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        more = " onnx onnx-ir" if package == "onnxruntime_genai" else ""
        raise UsageError(f"needs the package {name}", where="--to", fix=f"pip install {name}{more}")


def _run(command: list[str], what: str) -> None:
    """Run a converter; its last line of complaint becomes ours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    last = said[-1].strip() if said else f"exit status {done.returncode}"
    if "get_vocab_base_pre" in done.stderr or "pre-tokenizer" in last:
        raise UnsupportedModelError(
            "llama.cpp does not know this tokenizer",
            where="--to gguf",
            fix=f"say how it splits text by --pre-tokenizer, such as {PRE_TOKENIZERS}; the result is checked",
        )
    last = re.sub(r"\S*/mha2gqa-export-\w+/", "", last)  # where the checkpoint was staged
    if absent := re.search(r"No module named '(\w+)", last):
        raise UsageError(f"needs the package {absent[1]}", where=what, fix=f"pip install {absent[1]}")
    if re.search(r"not (currently )?supported|No conversion is registered", last):
        raise UnsupportedModelError(f"lacks this architecture ({last})", where=what)
    raise CheckpointError(last, where=what)


def _gguf(source: Path, file: Path, root: Path | None, precision: str | None, name: str | None) -> None:
    command = [sys.executable, "-c", RUN_GGUF, str(root), name or "", str(source), "--outfile", str(file)]
    _run([*command, "--outtype", precision or "f16"], "convert_hf_to_gguf.py")


def _ct2(source: Path, folder: Path, precision: str | None) -> None:
    # In a process of its own: it imports transformers' classes by their older names.
    code = (
        "import sys; from ctranslate2.converters import TransformersConverter as C; "
        "C(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3] or None, force=True)"
    )
    _run([sys.executable, "-c", code, str(source), str(folder), precision or ""], "ctranslate2")


def _onnx(source: Path, folder: Path, precision: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="mha2gqa-onnx-") as cache:
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(source),
            "-o",
            str(folder),
        ]
        _run([*command, "-p", precision or "fp32", "-e", "cpu", "-c", cache], "onnxruntime-genai's builder")


def _compare(source: Path, lines: list[str], read: Callable[[str], list[int]]) -> Check:
    """Token ids of the engine beside those of the checkpoint's tokenizer, without special tokens."""
    tokenizer = load_tokenizer(source)
    for line in lines:
        right, got = tokenizer(line, add_special_tokens=False)["input_ids"], read(line)
        if list(got) != list(right):
            return Check(
                "tokenizer", False, f"the engine reads {line[:60]!r} as other tokens than the checkpoint"
            )
    return Check("tokenizer", True, f"{len(lines)} lines read alike")


def _check_gguf(file: Path, source: Path, lines: list[str]) -> Check:
    if importlib.util.find_spec("xllamacpp") is not None:
        code = (
            "import json, sys, urllib.request, os\n"
            "from xllamacpp import CommonParams, Server\n"
            "p = CommonParams(); p.model.path = sys.argv[1]; p.n_ctx = 64; p.n_parallel = 1; p.warmup = False\n"
            "s = Server(p); out = []\n"
            "for line in json.loads(sys.stdin.read()):\n"
            "    body = json.dumps({'content': line, 'add_special': False}).encode()\n"
            "    ask = urllib.request.Request(s.listening_address + '/tokenize', body, "
            "{'Content-Type': 'application/json'})\n"
            "    out.append(json.loads(urllib.request.urlopen(ask, timeout=60).read())['tokens'])\n"
            "print('\\n' + json.dumps(out), flush=True); os._exit(0)"
        )
    elif importlib.util.find_spec("llama_cpp") is not None:
        code = (
            "import json, sys\nfrom llama_cpp import Llama\n"
            "m = Llama(sys.argv[1], vocab_only=True, verbose=False)\n"
            "print('\\n' + json.dumps([m.tokenize(x.encode(), add_bos=False, special=True) "
            "for x in json.loads(sys.stdin.read())]))"
        )
    else:
        return Check("tokenizer", None, "not checked: pip install xllamacpp (or llama-cpp-python)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], input=json.dumps(lines), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check("tokenizer", False, f"llama.cpp cannot load the result: {last}")
    found = dict(zip(lines, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))
    return _compare(source, lines, found.__getitem__)


def _check_ct2(folder: Path, source: Path, lines: list[str]) -> Check:
    """CTranslate2 takes token strings: the place of each in its vocabulary must be the token's number."""
    vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    place = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = load_tokenizer(source)

    def read(line: str) -> list[int]:
        return [place.get(token, -1) for token in tokenizer.tokenize(line)]

    return _compare(source, lines, read)


def _check_onnx(folder: Path, source: Path, lines: list[str]) -> Check:
    import onnxruntime_genai as engine

    try:
        tokenizer = engine.Tokenizer(engine.Model(str(folder)))
    except Exception as error:  # their bindings raise what they like; without it text cannot be served
        return Check("tokenizer", False, f"onnxruntime-genai cannot load it: {str(error).splitlines()[0]}")
    return _compare(source, lines, lambda line: list(map(int, tokenizer.encode(line))))


__all__ = [
    "FORMATS",
    "ExportResult",
    "check_architecture",
    "export",
    "llama_cpp_sources",
    "sample_lines",
    "staged",
    "supported_architectures",
    "write_gguf",
]
