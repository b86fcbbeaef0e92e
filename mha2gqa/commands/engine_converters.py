"""The engines' own converters, each run in a process of its own; their last error line becomes an error of ours.

A converter reads a folder of links to the checkpoint, with the older config keys that it still expects.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoints.config_spelling import both_spellings
from ..errors import CheckpointError, UnsupportedModelError, UsageError

PRE_TOKENIZERS = "gpt-2, llama-bpe, qwen2"
PACKAGES = {"ct2": "ctranslate2", "onnx": "onnxruntime_genai"}
# The converter refuses tokenizers that are not on its list; the user may name how it splits text.
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


@contextmanager
def staged(source: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary folder of links to a checkpoint, whose config also has the older keys that converters read."""
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


def to_gguf(
    source: Path,
    config: Mapping[str, Any],
    file: Path,
    root: Path,
    precision: str | None = None,
    pre_tokenizer: str | None = None,
) -> None:
    """Write a checkpoint as one .gguf file, by llama.cpp's converter.

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
        command = [sys.executable, "-c", RUN_GGUF, str(root), pre_tokenizer or "", str(staging)]
        command += ["--outfile", str(file), "--outtype", precision or "f16"]
        _run(command, "convert_hf_to_gguf.py")


def to_ct2(source: Path, config: Mapping[str, Any], folder: Path, precision: str | None = None) -> None:
    """Write a checkpoint for CTranslate2, by its converter; arguments and errors as `to_gguf`."""
    # In a process of its own: it imports transformers' classes by their older names.
    code = (
        "import sys; from ctranslate2.converters import TransformersConverter as C; "
        "C(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3] or None, force=True)"
    )
    with staged(source, config) as staging:
        _run([sys.executable, "-c", code, str(staging), str(folder), precision or ""], "ctranslate2")


def to_onnx(source: Path, config: Mapping[str, Any], folder: Path, precision: str | None = None) -> None:
    """Write a checkpoint for ONNX Runtime, by the builder of onnxruntime-genai; arguments and errors as `to_gguf`."""
    with staged(source, config) as staging, tempfile.TemporaryDirectory(prefix="mha2gqa-onnx-") as cache:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(staging), "-o", str(folder)]
        command += ["-p", precision or "fp32", "-e", "cpu", "-c", cache]
        _run(command, "onnxruntime-genai's builder")


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


def require_converter(to: str) -> None:
    """Refuse a format whose converter is a package that is not installed.

    Raises:
        UsageError: It names the package to install.
    """
    package = PACKAGES.get(to)
    if package is not None and importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        more = " onnx onnx-ir" if package == "onnxruntime_genai" else ""
        raise UsageError(f"needs the package {name}", where="--to", fix=f"pip install {name}{more}")


def _run(command: list[str], what: str) -> None:
    """Run a converter; the last line of its errors becomes the message of ours."""
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
