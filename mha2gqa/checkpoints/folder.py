"""What kind of folder a path is, before anything in it is read: where its weights are, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError, listed, quoted
from .json_files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_SINGLE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER = "adapter_config.json"

# What other programs leave instead of weights that transformers loads: a pattern, what it is, what to do.
_OTHERS = (
    ("adapter_model.*", "an adapter, not a model", "merge it into its base model first"),
    ("*.gguf", "only GGUF files", "give the original safetensors checkpoint"),
    ("tf_model.h5", "only TensorFlow weights", "load them with from_tf=True and save the model as safetensors"),
    ("flax_model.msgpack", "only Flax weights", "save the model as safetensors first"),
    ("*.onnx", "only ONNX files", "give the checkpoint they were exported from"),
    ("weights*.npz", "weights of an old MLX version", "give the original safetensors checkpoint"),
    ("zero_to_fp32.py", "a DeepSpeed checkpoint", "run its zero_to_fp32.py and save the model as safetensors"),
    ("global_step*", "a DeepSpeed checkpoint", "collect it with zero_to_fp32.py and save the model"),
    ("pytorch_model_fsdp*", "a sharded FSDP checkpoint", "run `accelerate merge-weights` first"),
    ("*.distcp", "a torch.distributed checkpoint", "collect it with torch.distributed.checkpoint.format_utils"),
    ("mp_rank_*", "a Megatron checkpoint", "convert it to the Hugging Face format first"),
    ("consolidated.*", "weights in their author's own format", "convert them to the Hugging Face format first"),
    ("*.ckpt", "a training checkpoint", "save the model inside with save_pretrained"),
    ("*.pt", "a training checkpoint", "save the model inside with save_pretrained"),
    ("*.pth", "a training checkpoint", "save the model inside with save_pretrained"),
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The weight files of a checkpoint.

    Args:
        files: Relative to the folder, with `/`, in the order they are read in.
        is_bin: Whether they are pickled.
        index: The index they come from; None for a single file.
        weight_map: Tensor name -> file, as that index says.
    """

    files: tuple[str, ...]
    is_bin: bool
    index: Path | None = None
    weight_map: dict[str, str] = field(default_factory=dict)


def check_model_folder(folder: Path) -> None:
    """Refuse what is not a whole model in the Hugging Face format.

    Raises:
        CheckpointError: It is something else, or an adapter lies beside the model; what to do is said.
    """
    if not folder.is_dir():
        raise CheckpointError(
            "no such folder", where=folder, fix="give a checkpoint folder or a hub id ORG/NAME"
        )
    config, adapter = _there(folder / "config.json"), _there(folder / ADAPTER)
    if adapter and not config:
        raise CheckpointError(
            "an adapter, not a model", where=folder, fix="merge it into its base model first"
        )
    if adapter:
        raise CheckpointError(
            "an adapter lies beside the model",
            where=folder / ADAPTER,
            fix="merge it into the model, or move the adapter's files away",
        )
    if not config:
        inside = sorted(str(p.parent.relative_to(folder)) for p in _below(folder, "config.json"))
        fix = f"give {folder / inside[0]}" if inside else "give a folder in the Hugging Face format"
        what = f"no config.json here, but in {listed(inside, 3)}" if inside else "no config.json"
        raise CheckpointError(what, where=folder, fix=fix)


def has_weights(folder: Path) -> bool:
    """Whether there are weight files, whole or not: else only the config can be read."""
    return any(_there(folder / name) for name in (SINGLE, INDEX, BIN_SINGLE, BIN_INDEX)) or bool(
        _what_else(folder)
    )


def find_weights(folder: Path) -> Weights:
    """The files that hold a model's tensors, as transformers would choose them.

    Raises:
        CheckpointError: There are none, an index names what is missing or lies outside, or a single file and an
            index contradict each other.
    """
    has = {name for name in (SINGLE, INDEX, BIN_SINGLE, BIN_INDEX) if _there(folder / name)}
    if not has:
        what, fix = _what_else(folder) or (
            f"no {SINGLE} and no {INDEX}",
            "save the model as safetensors first",
        )
        raise CheckpointError(what, where=folder, fix=fix)
    is_bin = not has & {SINGLE, INDEX}
    single, index = (BIN_SINGLE, BIN_INDEX) if is_bin else (SINGLE, INDEX)
    if index not in has:
        return Weights((single,), is_bin)
    weight_map = _weight_map(folder / index)
    files = tuple(sorted(set(weight_map.values())))
    if single in has:
        if files != (single,):
            raise CheckpointError(
                f"both {single} and {index} are there, and the index names {listed(files, 2)}; loaders take the first",
                where=folder,
                fix="remove the stale one",
            )
        return Weights((single,), is_bin, folder / index, weight_map)
    if missing := [name for name in files if not (folder / name).exists()]:
        dangling = [name for name in missing if (folder / name).is_symlink()]
        what = "links that lead nowhere" if dangling else "files that are missing"
        raise CheckpointError(
            f"the index names {what}: {listed(dangling or missing)}", where=folder, fix="download them again"
        )
    return Weights(files, is_bin, folder / index, weight_map)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file inside the folder, checked.

    Raises:
        CheckpointError: It is missing, empty, or names what cannot be a weight file of this folder.
    """
    weight_map: Any = read_json(index, fix="restore the original index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map", where=index, fix="restore the original index")
    inside: dict[str, str] = {}
    for file in weight_map.values():
        if not isinstance(file, str) or file not in inside:
            inside[str(file)] = _inside(index, file)
    return {name: inside[file] for name, file in weight_map.items()}


def _inside(index: Path, file: Any) -> str:
    """The file as a normal relative path.

    Raises:
        CheckpointError: It is not the name of a weight file, or leads out of the folder.
    """
    path = PurePosixPath(file) if isinstance(file, str) else PurePosixPath()
    suffix = ".bin" if index.name == BIN_INDEX else ".safetensors"
    usable = isinstance(file, str) and "\0" not in file and path.suffix == suffix
    usable = usable and all(len(part.encode()) < 256 for part in path.parts) and len(path.parts) < 10
    if not usable or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"names {quoted(file)}, which is not a {suffix} file in this folder",
            where=index,
            fix="restore the original index",
        )
    return str(path)


def _there(path: Path) -> bool:
    """Whether the name is taken, if only by a link that leads nowhere: that must be said, not passed over."""
    return path.exists() or path.is_symlink()


def _below(folder: Path, name: str) -> list[Path]:
    """Files of that name one or two folders down, as training runs and the Hub's cache have them."""
    return [*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")]


def _what_else(folder: Path) -> tuple[str, str] | None:
    """What lies here instead of weights, and what to do; None where nothing is known."""
    below = sorted({str(p.parent.relative_to(folder)) for p in _below(folder, "*.safetensors")})
    if below:
        return f"no weights here, but in {listed(below, 3)}", f"give {folder / below[0]}"
    if shards := sorted(p.name for p in folder.glob("*.safetensors")):
        return f"{listed(shards, 2)} without {INDEX}", "restore the index, or download the model again"
    if bins := sorted(p.name for p in folder.glob("pytorch_model-*.bin")):
        return f"{listed(bins, 2)} without {BIN_INDEX}", "restore the index, or download the model again"
    for pattern, what, fix in _OTHERS:
        if found := next(folder.glob(pattern), None):
            return f"{what} ({quoted(found.name)})", fix
    return None
