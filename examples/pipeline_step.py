"""A step of a training pipeline: convert, judge on held-out text, and stop the pipeline if too much was lost.

    python examples/pipeline_step.py            # exit code 0, or 3 where the gate does not hold

Every call returns a dataclass and prints nothing; errors are subclasses of `Mha2gqaError` with an exit code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from mha2gqa import convert, evaluate
from mha2gqa.assets import heldout_path, tiny_model_path
from mha2gqa.errors import Mha2gqaError
from mha2gqa.evaluation import check_gates


def step(folder: Path) -> dict[str, float]:
    """Convert the embedded model to half its KV heads and compare it with the original.

    Raises:
        GateError: Perplexity more than trebled.
    """
    source, out = tiny_model_path(), folder / "gqa4"
    convert(source, out, groups=4, method="joint")
    result = evaluate([source, out], heldout_path(), protocol="blocks", window=256, max_tokens=8192)
    check_gates(result, max_ppl_ratio=3.0)
    return {Path(model.path).name: round(float(model.loss or 0), 4) for model in result.models}


def main() -> int:
    """Run the step in a scratch folder."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(json.dumps(step(Path(folder))))
        except Mha2gqaError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
