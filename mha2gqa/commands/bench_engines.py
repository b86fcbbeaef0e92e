"""Decode speed in engines that are installed beside this package: llama.cpp by its own tool, vLLM by its Python API.

The engine measures. This module finds it, gives it the model, and puts its figures into rows of `bench`; what an
engine does not report is left out of the row.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, get_args

from ..checkpoints.hf_config import load_config_json
from ..config.commands import Decoder
from ..errors import CheckpointError, UnsupportedModelError, UsageError, reason
from ..kv_cache import kv_bytes, step_weight_bytes
from ..modeling import PREFIX
from .engine_converters import llama_cpp_sources, supported_architectures, to_gguf
from .export import check_architecture

ENGINES: tuple[Decoder, ...] = get_args(Decoder)
TOOL = "llama-batched-bench"
ATTEMPTS = 3
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # of a cached number in llama.cpp, scales included
# Options of `bench` that each engine uses, beside those that all do.
USES = {
    "transformers": {"dtype", "device", "memory", "compile", "trust_remote_code"},
    "llama.cpp": {"device", "cache_type", "precision", "threads", "engine_path", "llama_cpp"},
    "vllm": {"dtype", "engine_path", "trust_remote_code"},
}
ENGINE_OPTIONS = frozenset().union(*USES.values())
CACHE_LINE = re.compile(r"size = +([\d.]+) MiB \( *(\d+) cells.*seqs")
LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] ")  # time and level of a line
VLLM_SCRIPT = Path(__file__).with_name("in_vllm.py")


class Engine(Protocol):
    """An engine that is there, with models that it knows.

    Attributes:
        version: As the engine names itself.
        device: Where it runs.
        dtype: Of the weights, as the engine names it.
        configs: Raw configs of the models that have one.
    """

    version: str
    device: str
    dtype: str
    configs: dict[str, dict[str, Any]]

    def row(self, path: str, batch: int, context: int, steps: int) -> dict[str, Any]:
        """What was measured of a model: keys of a row of `bench`, None where the engine does not say."""
        ...

    def cache_size(self, path: str, batch: int, context: int) -> float | None:
        """Bytes of cache that a model will need, None where only the engine knows."""
        ...


def check_options(engine: str, given: Mapping[str, Any], paths: Sequence[str]) -> None:
    """Refuse options and files that the engine has no use for.

    Args:
        engine: Its name.
        given: Options of `bench` that were set.
        paths: Its models.

    Raises:
        UsageError: The engine has no such option, or takes no such file.
    """
    for name in given:
        if name not in USES[engine]:
            able = " and ".join(other for other in ENGINES if name in USES[other])
            raise UsageError(
                f"is for {able}, not for {engine}", where=f"--{name.replace('_', '-')}", fix="leave it out"
            )
    for path in paths:
        if path.endswith(".gguf") and engine != "llama.cpp":
            raise UsageError("is for llama.cpp", where=path, fix="use --engine llama.cpp, or give the folder")


def row_of(
    path: str, batch: int, context: int, seconds: float, first_token: float, prompt: int, **more: Any
) -> dict[str, Any]:
    """A row of `bench` from what an engine said.

    Args:
        path, batch, context: As in the row.
        seconds: Of one step.
        first_token: Seconds of a prompt of one sequence.
        prompt: Its tokens.
        more: Further keys of the row.
    """
    return {
        "path": path,
        "batch": batch,
        "context": context,
        "tokens_per_second": batch / seconds,
        "milliseconds_per_step": seconds * 1e3,
        "first_token_milliseconds": first_token * 1e3,
        "prefill_tokens_per_second": prompt / first_token,
        "warnings": [],
        **more,
    }


# --- llama.cpp -----------------------------------------------------------------------------------------


class LlamaCpp:
    """llama.cpp, by `llama-batched-bench`. Every model is checked before the first is exported.

    Args:
        paths: Folders and .gguf files.
        cache_type: Of keys and values; None for f16.
        precision: Of what is exported from a folder; None for f16.
        threads: None for llama.cpp's choice.
        device: `auto`, `cpu`, or a name of llama.cpp's own.
        engine_path: Folder of its programs; None for PATH.
        llama_cpp: Sources with the converter, for folders.

    Raises:
        UsageError: The tool or the converter is not there.
        UnsupportedModelError: llama.cpp lacks an architecture.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        cache_type: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
        device: str = "auto",
        engine_path: str | Path | None = None,
        llama_cpp: str | Path | None = None,
    ) -> None:
        self.tool = _tool(engine_path)
        self.precision, self.cache_type, self.threads = precision or "f16", cache_type or "f16", threads
        files = [path for path in paths if path.endswith(".gguf")]
        for path in files:
            if not Path(path).is_file():
                raise UsageError("no such file", where=path)
            if precision:
                raise UsageError(
                    "a .gguf file has its precision already", where="--precision", fix="leave it out"
                )
        folders = [path for path in paths if path not in files]
        for path in folders:
            if not Path(path).is_dir():
                raise UsageError(
                    "no such folder", where=path, fix="llama.cpp takes local folders and .gguf files"
                )
        self.configs = {path: load_config_json(path) for path in folders}
        for path, config in self.configs.items():
            check_architecture(config, "gguf", where=path)
        self.sources = llama_cpp_sources(llama_cpp, "--engine llama.cpp") if self.configs else None
        if self.sources:
            _check_converter(self.sources, self.configs)
        self.dtype = self.precision if self.configs else "as stored"
        self.version = _version(self.tool)
        devices = [] if device == "cpu" else _devices(self.tool)
        self.device = device if device != "auto" else ", ".join(devices) or "cpu"

    def row(self, path: str, batch: int, context: int, steps: int) -> dict[str, Any]:
        """As `Engine` has it. The last of the timed steps attends to `context` tokens."""
        with self._file(path) as file:
            for _ in range(ATTEMPTS):
                said = self._run(file, path, batch, context, steps)
                if answer := _answer(said):
                    break
            size = file.stat().st_size
        if not answer:
            raise CheckpointError(
                f"{TOOL} measured nothing", where=path, fix="use another --batch or --context"
            )
        if answer["n_kv"] != batch * (answer["pp"] + answer["tg"]):
            raise UsageError(
                "shares the cache of a prompt among sequences", where=self.tool, fix="use a newer llama.cpp"
            )
        cache = _cache_bytes(said, context)
        seconds = answer["t_tg"] / answer["tg"]
        step = f"{answer['tg']} steps of {TOOL} after a prompt copied to every sequence"
        return row_of(
            path, batch, context, seconds, answer["t_pp"], answer["pp"],
            kv_bytes=cache, weight_bytes=size, step_bytes=cache and size + cache, step=step,
            attention=f"flash, {self.cache_type} cache", threads=answer.get("n_threads"),
        )  # fmt: skip

    def cache_size(self, path: str, batch: int, context: int) -> float | None:
        """Bytes of cache that a model will need, None where only the engine knows."""
        if path not in self.configs:
            return None
        numbers = kv_bytes(self.configs[path], batch=batch, context=context, dtype_bytes=1)
        return numbers * BITS[self.cache_type] / 8

    @contextmanager
    def _file(self, path: str) -> Iterator[Path]:
        """The model's .gguf file; a folder is exported and the file deleted afterwards."""
        if path not in self.configs:
            yield Path(path)
            return
        assert self.sources is not None
        with tempfile.TemporaryDirectory(prefix="mha2gqa-bench-") as name:
            file = Path(name) / "model.gguf"
            try:
                to_gguf(Path(path), self.configs[path], file, self.sources, self.precision)
            except UnsupportedModelError as error:
                if "tokenizer" not in error.what:
                    raise
                # Speed does not depend on how text is split: any name that the converter knows will do.
                to_gguf(Path(path), self.configs[path], file, self.sources, self.precision, "gpt-2")
            yield file

    def _run(self, file: Path, path: str, batch: int, context: int, steps: int) -> str:
        steps = min(steps, context - 1)
        # The tool may end before its last lines are written: a second, short measurement follows the one that counts.
        words = [self.tool, "-m", file, "-c", batch * context, "-npp", f"{context - steps},1", "-ntg", steps]
        words += ["-npl", batch, "-pps", "-fa", "on", "-ctk", self.cache_type, "-ctv", self.cache_type]
        words += ["--output-format", "jsonl", "-lv", 4]  # at this level it says how large the cache is
        words += ["-t", self.threads] if self.threads else []
        words += ["-dev", "none" if self.device == "cpu" else self.device] if self.device else []
        return _said(words, path)


def _tool(folder: str | Path | None) -> str:
    """The measuring program of llama.cpp."""
    found = shutil.which(TOOL, path=None if folder is None else str(folder))
    if found is None:
        raise UsageError(
            f"no program {TOOL} {'on PATH' if folder is None else 'there'}",
            where="--engine llama.cpp" if folder is None else f"--engine-path {folder}",
            fix="build llama.cpp (cmake -B build && cmake --build build) and give build/bin by --engine-path",
        )
    return found


def _check_converter(sources: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse classes that the converter does not list."""
    known = supported_architectures(sources)
    for path, config in configs.items():
        names = config.get("architectures") or []
        if known and names and not set(names) & known:
            raise UnsupportedModelError(
                f"llama.cpp's converter lacks {names[0]}", where=path, fix="use transformers"
            )


def _said(words: Sequence[Any], where: object) -> str:
    """What a program printed on both streams.

    Raises:
        CheckpointError: It failed; with the first line that tells of an error.
    """
    done = subprocess.run(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"^[\d.]+ E |\berror\b|failed", line)]
        first = (telling or lines[-1:] or [f"exit status {done.returncode}"])[0]
        raise CheckpointError(f"{Path(str(words[0])).name}: {LOG_PREFIX.sub('', first)}", where=where)
    return done.stdout


def _version(tool: str) -> str:
    said = _said([tool, "--version"], tool)
    found = re.search(r"version: *(.+)", said)
    return found[1].strip() if found else "unknown version"


def _devices(tool: str) -> list[str]:
    """Names of the accelerators that this build of llama.cpp uses."""
    said = _said([tool, "--list-devices"], tool)
    return re.findall(r"^ +(\w+): ", said, re.M)


def _answer(said: str) -> dict[str, Any]:
    """The first measurement of the tool; nothing where it is not among the lines."""
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{") and '"t_tg"' in line]
    return next((dict(one) for one in found if one["pp"] > 1 or len(found) > 1), {})


def _cache_bytes(said: str, context: int) -> int | None:
    """Bytes of cache that `context` tokens of every sequence take, of what the engine said to have taken."""
    found = CACHE_LINE.findall(said)
    return round(sum(float(size) * min(1, context / int(cells)) for size, cells in found) * 2**20) or None


# --- vLLM ----------------------------------------------------------------------------------------------


class VLLM:
    """vLLM by its Python API, in a process of its own.

    Args:
        paths: Folders or Hub ids.
        dtype: As vLLM names it.
        engine_path: The Python that has vLLM; None for this one.
        trust_remote_code: Run code that comes with a model.

    Raises:
        UsageError: vLLM is not there.
        UnsupportedModelError: It lacks an architecture.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        dtype: str = "auto",
        engine_path: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.configs = {path: load_config_json(path) for path in paths}
        self.dtype, self.trust = dtype, trust_remote_code
        for path, config in self.configs.items():
            if str(config.get("model_type")).startswith(PREFIX):
                raise UnsupportedModelError(
                    f"{config['model_type']} is a class of its own that runs in transformers only", where=path
                )
        self.python = str(engine_path or sys.executable)
        if engine_path is None and importlib.util.find_spec("vllm") is None:
            raise UsageError(
                "vLLM is not installed", where="--engine vllm",
                fix="pip install vllm, or give the Python that has it by --engine-path",
            )  # fmt: skip
        about = self._ask({"about": [config.get("architectures") or [] for config in self.configs.values()]})
        self.version, self.device = about["version"], about["device"]
        for path, names, known in zip(paths, about["asked"], about["known"], strict=True):
            if not known:
                raise UnsupportedModelError(
                    f"vLLM lacks {', '.join(names)}", where=path, fix="use transformers"
                )

    def row(self, path: str, batch: int, context: int, steps: int) -> dict[str, Any]:
        """As `Engine` has it. The last of the timed steps attends to `context` tokens."""
        config, steps = self.configs[path], min(steps, context - 1)
        job = {"model": path, "batch": batch, "prompt": context - steps, "steps": steps, "dtype": self.dtype}
        job |= {"trust_remote_code": self.trust, "cache_bytes": self.cache_size(path, batch, context)}
        said = self._ask(job, path)
        size = kv_bytes(config, batch=batch, context=context, dtype_bytes=said["itemsize"])
        weights = said.get("weight_bytes")
        step = f"{steps} steps between two calls of generate"
        return row_of(
            path, batch, context, said["seconds"], said["first_token_seconds"], context - steps, kv_bytes=size,
            weight_bytes=weights, step=step, attention=said["attention"], warnings=said["warnings"],
            step_bytes=weights and size + step_weight_bytes(config, said["tensors"], batch),
        )  # fmt: skip

    def cache_size(self, path: str, batch: int, context: int) -> float | None:
        """Bytes of cache that a model will need."""
        return kv_bytes(self.configs[path], batch=batch, context=context)

    def _ask(self, job: Mapping[str, Any], where: str = "--engine vllm") -> dict[str, Any]:
        """Run the script of vLLM's process; its answer is its last line."""
        done = subprocess.run(
            [self.python, str(VLLM_SCRIPT)], input=json.dumps(job), capture_output=True, text=True,
            errors="replace", env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["no answer"]
            raise CheckpointError(reason(RuntimeError(said[-1])), where=where)
        answer = dict(json.loads(lines[-1]))
        if "usage" in answer:
            raise UsageError(answer["usage"], where=where, fix=answer.get("fix"))
        return answer


__all__ = ["ENGINES", "VLLM", "Engine", "LlamaCpp", "check_options", "row_of"]
