"""Benchmark tasks: handed over to lm-eval, which is an optional install (`pip install 'mha2gqa[tasks]'`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TaskScores = dict[str, dict[str, float]]  # task -> metric (and metric_stderr) -> value


def check_tasks(tasks: Sequence[str]) -> None:
    """Fail before any model is loaded.

    Raises:
        UsageError: lm-eval is not installed, or it does not know a task.
    """
    if tasks:
        _find_tasks(tuple(tasks))


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    limit: int | None = None,
) -> TaskScores:
    """Score a loaded model on tasks of lm-eval.

    Args:
        model, tokenizer: The model.
        tasks: Names that lm-eval knows, or YAML files of local tasks (these work offline).
        batch_size: Sequences per forward pass.
        limit: At most so many examples of each task.

    Returns:
        Every metric of every task, with its standard error as `METRIC_stderr` where lm-eval gives one.

    Raises:
        UsageError: As `check_tasks`.
    """
    names, manager = _find_tasks(tuple(tasks))
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
    found = lm_eval.simple_evaluate(scorer, tasks=names, task_manager=manager, limit=limit)
    return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """`acc,none` becomes `acc`; other filters keep their name."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and "," in key
    }


@functools.lru_cache(maxsize=1)  # lm-eval reads all its task files: seconds
def _find_tasks(tasks: tuple[str, ...]) -> tuple[list[str], Any]:
    """Names of the tasks and the lm-eval task manager that has them all."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(
            "lm-eval is not installed", where="--tasks", fix="run pip install 'mha2gqa[tasks]'"
        ) from error
    names, folders = [], []
    for task in tasks:
        file = Path(task)
        if file.suffix in (".yaml", ".yml"):
            names.append(_name_in(file))
            folders.append(str(file.resolve().parent))
        else:
            names.append(task)
    only_files = len(folders) == len(names)
    manager = TaskManager(include_path=sorted(set(folders)) or None, include_defaults=not only_files)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UsageError(
            f"lm-eval knows no task {', '.join(unknown)}", where="--tasks", fix="see `lm-eval ls tasks`"
        )
    return names, manager


def _name_in(file: Path) -> str:
    """The task a YAML file defines (lm-eval's files hold tags that plain YAML readers refuse)."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({error})", where=f"--tasks {file}") from error
    found = re.search(r"^task:\s*['\"]?([\w./-]+)", text, re.MULTILINE)
    if found is None:
        raise UsageError("names no task", where=f"--tasks {file}", fix="it needs a line `task: NAME`")
    return found[1]
