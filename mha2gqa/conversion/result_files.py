"""The JSON files of a result: its config, and the heads that its generation config names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..checkpoints.atomic import write_text
from ..checkpoints.json_files import read_json
from ..modeling import modeling_file
from .plan import Plan


def write_config(folder: Path, plan: Plan) -> None:
    """Write config.json, and beside it the modelling code that the result needs, if any."""
    config = plan.config
    if plan.export is not None:
        shutil.copyfile(modeling_file(plan.export), folder / plan.export.file)
        tokenizer = folder / "tokenizer_config.json"
        named = tokenizer.exists() and "tokenizer_class" in json.loads(tokenizer.read_text(encoding="utf-8"))
        if not named and "tokenizer_class" not in config:
            config = {**config, "tokenizer_class": plan.export.tokenizer}
    write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def move_alignment_heads(folder: Path, plan: Plan) -> None:
    """Let generation_config.json name the heads that tell word times by their new numbers (Whisper)."""
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    pairs = raw.get("alignment_heads")
    if pairs and (moved := plan.moved(pairs)) != pairs:
        text = json.dumps(raw | {"alignment_heads": moved}, indent=2, ensure_ascii=False)
        write_text(path, text + "\n")
