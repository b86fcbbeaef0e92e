"""Load a model to run it: complete, on the right device, in the right dtype, remote code only on consent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import CheckpointError, UsageError, first_line, listed, reason
from ..modeling import refuse_encoder, register
from .dtypes import OPTION_NAMES, named_dtype, torch_dtype
from .folder import check_model_folder, find_weights
from .hf_config import is_encoder_decoder, load_config_json, stored_dtype, text_config
from .ignored_keys import without_ignored
from .json_files import LFS_POINTER, check_pointer
from .prefixes import PREFIXES, prefix_of
from .side_files import check_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelClass = Literal["causal", "seq2seq", "auto"]


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU.

    Raises:
        UsageError: The device does not exist here.
    """
    if str(device) == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"no such device here ({first_line(error)})",
            where=f"--device {device}",
            fix="try auto or cpu",
        ) from error
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def resolve_dtype(
    dtype: str | torch.dtype = "auto",
    device: torch.device | None = None,
    stored: torch.dtype = torch.float32,
) -> torch.dtype:
    """`auto` is the stored dtype on a GPU and float32 on a CPU, where half precision is slow.

    Args:
        dtype: `auto`, a name (`float32`, `bf16`, …) or a torch dtype.
        device: Where the model will run.
        stored: The dtype of the checkpoint.

    Raises:
        UsageError: The name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device is None or device.type == "cpu" else stored
    if dtype not in OPTION_NAMES or (found := named_dtype(dtype)) is None:
        raise UsageError(
            "no such dtype", where=f"--dtype {dtype}", fix=f"try auto, {', '.join(OPTION_NAMES)}"
        )
    return torch_dtype(found.stored)


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, *, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    check_tokenizer_files(Path(path))
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # whatever a class or a reader raises, it is this folder that it refuses
        raise CheckpointError(
            f"its tokenizer cannot be loaded ({reason(error)})",
            where=path,
            fix="copy the original model's tokenizer files beside the weights",
        ) from error


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    model_class: ModelClass = "auto",
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a model to run it, and accept nothing incomplete.

    transformers initialises missing tensors at random and merely warns; here that is an error.

    Args:
        path: Folder or Hub id.
        dtype: See `resolve_dtype`.
        device: See `resolve_device`.
        trust_remote_code: Run Python code that the folder brings along.
        attn_implementation: `eager`, `sdpa`, … or None for transformers' choice.
        model_class: `causal`, `seq2seq`, or `auto` (what the config says).
        revision: Branch, tag or commit of a Hub id.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: It cannot be loaded, tensors are missing, unexpected or of other shapes (all are
            named, sorted), or memory does not suffice (what is needed and what is there).
        UsageError: It needs code of its own and there is no consent.
        UnsupportedModelError: It is the encoder of an encoder-decoder, alone.

    Example:
        >>> load_model("llama-gqa8", dtype="bfloat16", device="cuda").config.num_key_value_heads  # doctest: +SKIP
        8
    """
    from transformers import AutoConfig

    raw = load_config_json(path, revision=revision)
    refuse_encoder(raw)
    register(raw)  # our own exported code runs from this package and needs no consent
    check_consent(raw, path, trust_remote_code)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device, stored_dtype(raw))
    check_memory(path, raw, dtype, device)
    chosen = loading_class(raw, model_class)
    common = {"trust_remote_code": trust_remote_code, "revision": revision}
    with quiet():
        try:
            loaded: Any = chosen.from_pretrained(
                path,
                config=AutoConfig.from_pretrained(path, **common),
                dtype=dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported in `info`, and refused below with the rest
                **common,
            )
        except Exception as error:  # as above
            raise CheckpointError(
                f"cannot be loaded ({reason(error)})",
                where=path,
                fix="check config.json and that no file is missing",
            ) from error
    model, info = loaded
    _check_loading_info(info, path, "auto_map" in raw and not trust_remote_code)
    return model.to(device).eval()


def loading_class(raw: Mapping[str, Any], model_class: ModelClass = "auto") -> Any:
    """The class of transformers that loads a checkpoint with its language-model head.

    An auto class; but for a multimodal model the very class that its config names, since auto
    classes know some of these only by their text model alone.

    Args:
        raw: `config.json`.
        model_class: As in `load_model`.
    """
    import transformers
    from transformers.models.auto import modeling_auto as known

    model_type, own = raw.get("model_type"), raw.get("auto_map", ())
    if model_class == "auto":
        model_class = "seq2seq" if is_encoder_decoder(raw) else "causal"
    if model_class == "seq2seq":
        speech = model_type in known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
        if speech or "AutoModelForSpeechSeq2Seq" in own:
            return transformers.AutoModelForSpeechSeq2Seq
        if (
            "AutoModelForTextToWaveform" in own
            or model_type in known.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES
        ):
            return transformers.AutoModelForTextToWaveform
        return transformers.AutoModelForSeq2SeqLM
    if not own and text_config(raw) is not raw:
        for name in raw.get("architectures") or ():
            named: Any = getattr(transformers, name, None)
            if hasattr(named, "can_generate") and named.can_generate():
                return named
    if model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return transformers.AutoModelForImageTextToText
        if model_type in known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
            return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def check_consent(raw: Mapping[str, Any], path: str | Path, consent: bool) -> None:
    """Refuse code of a checkpoint that transformers has no class for, unless there is consent.

    Raises:
        UsageError: It needs code of its own and there is no consent.
    """
    from transformers import CONFIG_MAPPING

    known = raw.get("model_type") in CONFIG_MAPPING
    if "auto_map" in raw and not known and not consent:
        raise UsageError(
            f"model_type {raw.get('model_type')!r} runs Python code from its folder",
            where=path,
            fix="read that code and pass --trust-remote-code if you trust it",
        )


def _check_loading_info(info: Mapping[str, Any], path: str | Path, own_code: bool) -> None:
    mismatched = [
        f"{name} {tuple(found)}, the config needs {tuple(needed)}"
        for name, found, needed in info["mismatched_keys"]
    ]
    faults = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": without_ignored(info["unexpected_keys"]),
        "of another shape": sorted(mismatched),
        "error": sorted(map(str, info.get("error_msgs", ()))),
    }
    parts = [f"{len(names)} {kind}: {listed(names)}" for kind, names in faults.items() if names]
    if parts:
        fix = _way_out(faults, own_code)
        raise CheckpointError(f"tensors do not fit the config: {'; '.join(parts)}", where=path, fix=fix)


def _way_out(faults: Mapping[str, list[str]], own_code: bool) -> str:
    """What to do about a checkpoint whose tensors are not those of its class."""
    if own_code:
        return "the folder brings its own code: pass --trust-remote-code if you trust it"
    if (prefix := prefix_of(faults["unexpected"])) is not None:
        return f"every name begins with {prefix!r}, it is {PREFIXES[prefix]}"
    if faults["unexpected"] and not any(names for kind, names in faults.items() if kind != "unexpected"):
        return "`mha2gqa convert --drop-extra NAMES` writes a copy without them"
    return "config and tensors must belong together; convert or download the model again"


# --- memory --------------------------------------------------------------------------------------------


def check_memory(
    path: str | Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse to load a model whose weights alone exceed the free memory of `device`.

    Raises:
        CheckpointError: With the bytes needed and the bytes there.
    """
    stored = weight_bytes(Path(path))
    free = free_memory(device)
    if stored is None or free is None:
        return
    needed = stored * dtype.itemsize // stored_dtype(config).itemsize
    if needed > free:
        raise CheckpointError(
            f"the weights need {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, "
            f"{device} has {free / 1e9:.1f} GB free",
            where=path,
            fix="choose another --device or a smaller --dtype",
        )


def weight_bytes(folder: Path) -> int | None:
    """Bytes of the weight files that transformers would read from `folder`; None if it is not local.

    Raises:
        CheckpointError: There are none, one is a Git LFS pointer, or what is there is not a complete model.
    """
    if not folder.is_dir():
        return None
    check_model_folder(folder)
    files = [folder / name for name in find_weights(folder).files]
    for file in files:
        try:
            with file.open("rb") as opened:
                check_pointer(opened.read(len(LFS_POINTER)), file)
        except OSError as error:
            raise CheckpointError(
                f"cannot be read ({error.strerror})", where=file, fix="check its rights, or download it again"
            ) from error
    return sum(file.stat().st_size for file in files)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


# --- helpers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' reports and bars off stderr: the errors here say the same in one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
