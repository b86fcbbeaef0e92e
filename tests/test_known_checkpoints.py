"""MHA checkpoints that people run: their published configs through `plan` and a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha2gqa import plan, run
from mha2gqa.config import recipe_from_dict

CONFIGS = Path(__file__).parent / "configs"
# Parameters as their model cards state them (billions), KV heads, head width, decoder layers with a cache, bytes
# of an element as stored, G to reach, and the card that the fits of a layer must run on (GB).
KNOWN = {
    "llama-2-7b": (6.74, 32, 128, 32, 2, 8, 24),
    "codellama-7b": (6.74, 32, 128, 32, 2, 8, 24),
    "deepseek-llm-7b": (6.91, 32, 128, 30, 2, 8, 24),
    "qwen1.5-7b": (7.72, 32, 128, 32, 2, 8, 24),
    "qwen1.5-72b": (72.3, 64, 128, 80, 2, 8, 80),
    "olmo-7b": (6.89, 32, 128, 32, 4, 8, 24),
    "olmo-2-7b": (7.30, 32, 128, 32, 4, 8, 24),
    "olmo-3-7b": (7.30, 32, 128, 32, 2, 8, 24),
    "command-r-35b": (35.0, 64, 128, 40, 2, 8, 80),
    "phi-3-mini-4k": (3.82, 32, 96, 32, 2, 8, 24),
    "gemma-7b": (8.54, 16, 256, 28, 2, 4, 24),
}


@pytest.mark.parametrize("name", KNOWN)
def test_plan_of_a_published_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    billions, heads, width, layers, itemsize, groups, card = KNOWN[name]
    source = CONFIGS / f"{name}.json"
    found = plan(source, groups=groups, gpu_memory=card * 1e9)
    assert found.parameters["before"] == pytest.approx(billions * 1e9, rel=0.005)
    assert (found.num_kv_heads, found.head_dim) == ({"before": heads, "after": groups}, width)
    assert found.kv_bytes_per_token == {
        "before": 2 * heads * width * layers * itemsize,
        "after": 2 * groups * width * layers * itemsize,
    }
    assert found.calibration["regression"]["fits"], "one layer of it fits this card"
    assert found.result_type == found.model_type, "the stock class holds fewer heads"
    monkeypatch.chdir(tmp_path)
    job = recipe_from_dict(
        {
            "source": str(source),
            "output": "out",
            "convert": {"groups": groups, "calibration": "org/text"},
            "evaluate": {"data": "org/text"},
        }
    )
    assert [stage["status"] for stage in run(job, dry_run=True).stages] == ["planned"] * 3
    assert not list(tmp_path.iterdir())


def test_plan_of_whisper_large() -> None:
    """Self- and cross-attention of 32 decoder layers, 20 heads of 64 each."""
    found = plan(CONFIGS / "whisper-large-v3.json", groups=5)
    assert found.parameters["before"] == pytest.approx(1.543e9, rel=0.005)
    assert found.num_kv_heads == {"before": 20, "after": 5} and found.head_dim == 64
    assert found.trust_remote_code and found.model_type == "whisper"
