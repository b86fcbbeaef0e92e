"""What a job has finished, so that running it again skips it and a changed recipe is noticed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.atomic import replacing, writing_to
from ..checkpoints.fingerprints import source_fingerprint
from ..distributed import is_rank_zero
from ..errors import UsageError
from ..progress import current
from ..uptraining.run_dir import changed_keys

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0


@dataclass
class StageRecords:
    """The finished stages of a job, one JSON file each.

    Args:
        folder: Where the files are.
        force: Do stages again whose inputs have changed, replacing their checkpoints.
        stages: What this run did, for the result.
        expected: How many stages there will be, for progress; 0 where that is not known.
    """

    folder: Path
    force: bool = False
    stages: list[dict[str, Any]] = field(default_factory=list)
    expected: int = 0

    def stage(
        self,
        name: str,
        inputs: Mapping[str, Any],
        work: Callable[[bool], dict[str, Any]],
        detail: Callable[[Mapping[str, Any]], str],
        product: Path | None = None,
        everywhere: bool = False,
    ) -> dict[str, Any]:
        """Do a stage, or give back what it gave before.

        Args:
            name: Of the stage, also of its file.
            inputs: All that its result depends on, as JSON data.
            work: Does it; its result is JSON data. Its argument says whether what is there may be replaced: with
                `force`, or where this very stage was begun before and never finished.
            detail: One line about a result.
            product: The checkpoint it makes. A finished stage with a product is never done over without
                `force`; one without (an evaluation) is simply done again when its inputs change.
            everywhere: Every process of a distributed job works; else the first works and the others wait.

        Returns:
            The result.

        Raises:
            UsageError: The product belongs to other inputs.
        """
        inputs = json.loads(json.dumps(inputs))
        record = self._read(name)
        if self._holds(record, inputs, product):
            assert record is not None
            self._note(name, "skipped", f"already done; {detail(record['result'])}", 0.0)
            return record["result"]
        if record is not None and product is not None and product.exists() and not self.force:
            self._refuse(name, record, inputs, product)
        began = time.monotonic()
        if everywhere or is_rank_zero():
            begun = self._read(f"{name}.begun")
            replace = self.force or (begun is not None and begun["inputs"] == inputs)
            if is_rank_zero():
                self._write(f"{name}.begun", inputs, {}, None)
            with current().part(name, len(self.stages) + 1, self.expected):
                current().stage("starting")
                result = work(replace)
            if is_rank_zero():
                self._write(name, inputs, result, product)
                self._path(f"{name}.begun").unlink()
        else:
            result = self._await(name, inputs, product)
        self._note(name, "done", detail(result), time.monotonic() - began)
        return result

    def _holds(
        self, record: Mapping[str, Any] | None, inputs: Mapping[str, Any], product: Path | None
    ) -> bool:
        if record is None or record["inputs"] != inputs:
            return False
        return product is None or (product.exists() and record["product"] == source_fingerprint(str(product)))

    def _refuse(self, name: str, record: Mapping[str, Any], inputs: Mapping[str, Any], product: Path) -> None:
        changes = "; ".join(changed_keys(_flat(record["inputs"]), _flat(inputs))) or "its files"
        raise UsageError(
            f"holds the stage {name} of another recipe (changed: {changes})",
            where=product,
            fix="choose another output, or --force to replace it",
        )

    def _note(self, name: str, status: str, detail: str, seconds: float) -> None:
        self.stages.append({"name": name, "status": status, "detail": detail, "seconds": round(seconds, 1)})
        logger.info("%s: %s", name, detail)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            record = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return (
            record if isinstance(record, dict) and {"inputs", "result", "product"} <= record.keys() else None
        )

    def _write(self, name: str, inputs: Mapping[str, Any], result: Any, product: Path | None) -> None:
        made = None if product is None else source_fingerprint(str(product))
        text = json.dumps({"inputs": inputs, "product": made, "result": result}, indent=1, ensure_ascii=False)
        with writing_to(self._path(name)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(name)) as partial:
                partial.write_text(text + "\n", encoding="utf-8")

    def _await(self, name: str, inputs: Mapping[str, Any], product: Path | None) -> dict[str, Any]:
        while True:
            record = self._read(name)
            if self._holds(record, inputs, product):
                assert record is not None
                return record["result"]
            time.sleep(POLL_SECONDS)


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON data with dotted keys."""
    if not isinstance(data, Mapping):
        return {prefix.rstrip("."): data}
    return {k: v for key, value in data.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
