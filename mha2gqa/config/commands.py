"""Options of the smaller commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .coerce import Bytes
from .convert import ConvertConfig
from .option import ADVANCED, CLI, OUTPUT, WHAT, Config, OptionError, option
from .reconstruct import Effort, ReconstructConfig, effort_conflicts, with_effort

Engine = Literal["gguf", "ct2", "onnx"]
Decoder = Literal["transformers", "llama.cpp", "vllm"]
CacheType = Literal["f16", "q8_0", "q4_0"]
GROUP_FLAGS = ("--groups", "--kv-heads")


@dataclass(frozen=True)
class PlanConfig(Config):
    """Every option of `plan`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    source: Any = option(
        ..., "Checkpoint folder, its config.json, or a Hub id.", WHAT, argument=True, form=str, where=(CLI,)
    )
    groups: int | None = option(
        None,
        "Key/value heads G of the result.",
        WHAT,
        metavar="G",
        flags=GROUP_FLAGS,
        where=(CLI,),
        lenient=True,
        unset="a quarter of the present number",
    )
    wide: int = option(
        1,
        "Wide heads, as convert has them: what they cost and where they pay beside plain ones.",
        WHAT,
        metavar="R",
        where=(CLI,),
        range=">= 1",
    )
    as_: str = option(
        "auto",
        "Model type to write the result as; none keeps the source's.",
        WHAT,
        metavar="TYPE",
        flags=("--as",),
        where=(CLI,),
    )
    drop_extra: tuple[str, ...] = option(
        (),
        "As convert has it: tensors to leave out. Repeatable.",
        ADVANCED,
        metavar="NAMES",
        where=(CLI,),
        unset="none",
    )
    allow_unchecked: bool = option(
        False, "As convert has it: allow a result that cannot be checked.", ADVANCED, where=(CLI,)
    )
    tp: int = option(
        1, "Tensor-parallel ranks that the result will be served on.", WHAT, where=(CLI,), range=">= 1"
    )
    batch: int = option(1, "Sequences decoded at once.", WHAT, where=(CLI,), range=">= 1")
    context: int | None = option(
        None,
        "Tokens per sequence.",
        WHAT,
        metavar="TOKENS",
        where=(CLI,),
        range="> 0",
        unset="the model's own",
    )
    gpu_memory: Bytes = option(
        80_000_000_000, "Memory of one device.", ADVANCED, metavar="SIZE", where=(CLI,), range="> 0"
    )
    gpus: int = option(
        1, "Devices that share calibration, for its price.", ADVANCED, where=(CLI,), range=">= 1"
    )
    calibration_tokens: int = option(
        ConvertConfig.calibration_tokens,
        "Tokens of calibration text, for its price.",
        ADVANCED,
        metavar="TOKENS",
        where=(CLI,),
        range=">= 1",
    )
    effort: Effort | None = option(
        None, "As convert has it, for its price.", ADVANCED, where=(CLI,), unset="normal"
    )
    fit: ReconstructConfig | Mapping[str, Any] | None = option(
        None,
        "As convert has it, for its price.",
        ADVANCED,
        metavar="KEY=VALUE",
        where=(CLI,),
        unset="see --fit help",
    )
    uptrain_tokens: int = option(
        1_000_000_000,
        "Budget of uptraining, for its price.",
        ADVANCED,
        metavar="TOKENS",
        where=(CLI,),
        range=">= 1",
    )
    bandwidth: Bytes = option(
        3_350_000_000_000,  # of an H100 SXM, from its data sheet
        "Memory bandwidth of one device, bytes per second.",
        ADVANCED,
        metavar="SIZE",
        where=(CLI,),
        range="> 0",
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a model on the Hub.",
        ADVANCED,
        metavar="REV",
        where=(CLI,),
        unset="main",
    )

    def conflicts(self) -> Iterator[OptionError]:
        """As `convert` has them."""
        if isinstance(self.fit, ReconstructConfig):
            yield from effort_conflicts(self.effort, self.fit)

    @property
    def fitting(self) -> ReconstructConfig | None:
        """As `convert` has it."""
        return with_effort(self.effort, self.fit if isinstance(self.fit, ReconstructConfig) else None)


@dataclass(frozen=True)
class BenchConfig(Config):
    """Every option of `bench`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    models: Any = option(
        ...,
        "Folders or Hub ids; for llama.cpp folders or .gguf files.",
        WHAT,
        argument=True,
        form=tuple[str, ...],
        where=(CLI,),
    )
    engine: Decoder = option(
        "transformers",
        "What decodes. Others than transformers are called where they are installed.",
        WHAT,
        where=(CLI,),
    )
    batch: int = option(1, "Sequences decoded at once.", WHAT, where=(CLI,), range=">= 1")
    context: int = option(
        1024,
        "Tokens that a step attends to, as far as the models reach.",
        WHAT,
        metavar="TOKENS",
        where=(CLI,),
        range=">= 1",
    )
    new_tokens: int = option(
        64, "Decode steps that are timed.", WHAT, metavar="TOKENS", where=(CLI,), range=">= 1"
    )
    dtype: str = option("auto", "Of the weights: auto, float32, bfloat16, …", ADVANCED, where=(CLI,))
    device: str = option("auto", "Where the models run: auto, cpu, cuda, …", ADVANCED, where=(CLI,))
    bandwidth: Bytes | None = option(
        None,
        "Memory bandwidth of the device, bytes per second.",
        ADVANCED,
        metavar="SIZE",
        where=(CLI,),
        range="> 0",
        unset="measured by a copy",
    )
    memory: tuple[Bytes, ...] = option(
        (),
        "Memory budget, such as 80GB: the largest batch that fits is timed too. Repeatable.",
        WHAT,
        metavar="SIZE",
        where=(CLI,),
        range="> 0",
        unset="none",
    )
    compile: bool | None = option(None, "Compile the layers.", ADVANCED, where=(CLI,), unset="on a GPU")
    cache_type: CacheType | None = option(
        None, "How llama.cpp stores keys and values.", WHAT, where=(CLI,), unset="f16"
    )
    precision: str | None = option(
        None,
        "What llama.cpp gets of a folder, as export names it: f16, q8_0.",
        WHAT,
        metavar="NAME",
        where=(CLI,),
        unset="f16",
    )
    threads: int | None = option(
        None, "Threads of llama.cpp.", ADVANCED, where=(CLI,), range=">= 1", unset="its own choice"
    )
    engine_path: Any = option(
        None,
        "Where the engine is: the folder of llama.cpp's programs, or the Python that has vLLM.",
        ADVANCED,
        metavar="PATH",
        form=str | None,
        where=(CLI,),
        unset="PATH for llama.cpp, this Python for vLLM",
    )
    llama_cpp: Any = option(
        None,
        "Sources of llama.cpp, whose converter a folder needs.",
        ADVANCED,
        metavar="DIR",
        form=str | None,
        where=(CLI,),
        unset="the folder that LLAMA_CPP names",
    )
    trust_remote_code: bool = option(False, "Run the models' own code (dangerous).", ADVANCED, where=(CLI,))


@dataclass(frozen=True)
class VerifyConfig(Config):
    """Every option of `verify`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    out: Any = option(..., "A converted folder.", WHAT, argument=True, form=str, where=(CLI,))
    against: Any = option(
        None,
        "The original: unchanged tensors must be equal to its own.",
        WHAT,
        metavar="SOURCE",
        form=str | None,
        where=(CLI,),
        unset="not compared",
    )
    full: bool = option(False, "Read every tensor.", WHAT, where=(CLI,))


@dataclass(frozen=True)
class ExportConfig(Config):
    """Every option of `export`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    model: Any = option(..., "Folder of the checkpoint.", WHAT, argument=True, form=str, where=(CLI,))
    out: Any = option(..., "Folder to make.", WHAT, argument=True, form=str, where=(CLI,))
    to: Engine = option(
        ..., "Format of the engine: llama.cpp, CTranslate2 or ONNX Runtime.", WHAT, where=(CLI,)
    )
    precision: str | None = option(
        None,
        "As the engine's converter names it: f16, q8_0; int8, float16; fp32, int4.",
        WHAT,
        metavar="NAME",
        where=(CLI,),
        unset="the converter's own",
    )
    llama_cpp: Any = option(
        None,
        "Sources of llama.cpp with its converter.",
        ADVANCED,
        metavar="DIR",
        form=str | None,
        where=(CLI,),
        unset="the folder that LLAMA_CPP names",
    )
    pre_tokenizer: str | None = option(
        None,
        "How llama.cpp splits text, where it does not know the tokenizer.",
        ADVANCED,
        metavar="NAME",
        where=(CLI,),
        unset="what its converter finds",
    )
    text: Any = option(
        None,
        "Text whose first 100 lines both tokenizers must read alike.",
        ADVANCED,
        metavar="FILE",
        form=str | None,
        where=(CLI,),
        unset="built in",
    )
    force: bool = option(False, "Replace an output that mha2gqa wrote.", OUTPUT, where=(CLI,))


@dataclass(frozen=True)
class PushConfig(Config):
    """Every option of `push`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    folder: Any = option(
        ..., "A converted or uptrained checkpoint.", WHAT, argument=True, form=str, where=(CLI,)
    )
    repo: str = option(..., "Repository on the Hub.", WHAT, argument=True, metavar="ORG/NAME", where=(CLI,))
    private: bool = option(False, "Make a private repository, where there is none yet.", WHAT, where=(CLI,))
    dry_run: bool = option(False, "Verify, and list what would be uploaded.", WHAT, where=(CLI,))
    message: str | None = option(
        None, "Commit message.", WHAT, metavar="TEXT", where=(CLI,), unset="says what mha2gqa did"
    )


@dataclass(frozen=True)
class DemoConfig(Config):
    """Every option of `demo`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    out: Any = option("mha2gqa-demo", "Folder to work in.", OUTPUT, metavar="DIR", form=str, where=(CLI,))
    groups: int = option(
        4,
        "Key/value heads of the result, of 8.",
        WHAT,
        metavar="G",
        flags=GROUP_FLAGS,
        where=(CLI,),
        lenient=True,
    )
    force: bool = option(False, "Do everything again.", OUTPUT, where=(CLI,))
