"""Whether the class of a checkpoint loads all its tensors and no others: of a folder, or of names and shapes."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.dtypes import stored_nbytes
from ..checkpoints.ignored_keys import without_ignored
from ..checkpoints.loading import quiet
from ..checkpoints.reader import SINGLE
from ..errors import first_line, listed, quoted, reason
from ..results import Check
from .tiny_model import model_class, neutral, of_own_code

NAME = "loads"
Tensors = Mapping[str, Sequence[Any]]  # name -> (safetensors dtype, shape)


def check_loads(folder: Path, config: Mapping[str, Any]) -> Check:
    """Load a folder on the meta device: no tensor may be missing, unexpected or of another shape.

    Args:
        folder: With weights; its `config.json` is not read.
        config: Raw config. What it says of attention kernels and code of its own is left out: the class of
            transformers for its model type answers.
    """
    cls = model_class(config)
    if cls is None:
        kind = quoted(config.get("model_type"))
        return Check(NAME, None, f"not checked: transformers has no class for models of type {kind}")
    try:
        info = _loading_info(cls, folder, config)
    except ImportError as error:  # a vision tower that needs a package of its own
        return Check(NAME, None, f"not checked: {first_line(error)}")
    except Exception as error:  # whatever the class raises, it is this folder that it refuses
        return Check(NAME, False, f"{cls.__name__}: {reason(error)}")
    wrong = _wrong(info)
    if wrong and of_own_code(config):
        wrong += "; the config names code of its own, which may differ"
    return Check(NAME, not wrong, f"{cls.__name__}: {wrong or 'no missing or unexpected tensor'}")


def check_hollow(config: Mapping[str, Any], tensors: Tensors) -> Check:
    """`check_loads` of a folder that is not written yet.

    A file is made that has the header of such tensors and is a hole behind it: no number is read or written.

    Args:
        config: Raw config of the result.
        tensors: Its tensors.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _hollow(folder / SINGLE, tensors)
            _write_neutral(folder, config)
        except OSError:  # no room for a file of that size here: the finished folder is checked
            return Check(NAME, True, "checked on the finished folder")
        return check_loads(folder, config)


def _hollow(path: Path, tensors: Tensors) -> None:
    """A safetensors file with holes in place of numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + stored_nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        os.ftruncate(file.fileno(), 8 + len(text) + end)


def _write_neutral(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(neutral(config)), encoding="utf-8")


def _loading_info(cls: Any, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    with quiet(), tempfile.TemporaryDirectory() as name:
        _write_neutral(Path(name), config)
        _, info = cls.from_pretrained(
            folder,
            config=cls.config_class.from_pretrained(name),
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in `info` then
        )
    return dict(info)


def _wrong(info: Mapping[str, Any]) -> str:
    """What is wrong with a checkpoint's tensors, in a few words; empty if nothing is."""
    shapes = sorted(
        f"{name} {list(found)}, the config needs {list(needed)}"
        for name, found, needed in info.get("mismatched_keys", ())
    )
    found = {
        "missing": sorted(map(str, info.get("missing_keys", ()))),
        "unknown to the class": without_ignored(map(str, info.get("unexpected_keys", ()))),
        "of another shape": shapes,
        "refused": sorted(map(str, info.get("error_msgs", ()))),
    }
    return "; ".join(f"{kind}: {listed(names, 3)}" for kind, names in found.items() if names)
