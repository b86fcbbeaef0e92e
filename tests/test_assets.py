"""The embedded model: small, loadable, multi-head, judged by text it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mha2gqa.assets import demo_texts, heldout_path, is_heldout, stdlib_documents, tiny_model_path
from mha2gqa.errors import DataError


def test_the_embedded_folder_is_small_and_multi_head() -> None:
    folder = tiny_model_path()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == config["num_key_value_heads"] >= 8
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000
    record = json.loads((folder / "train.json").read_text())
    assert record["tokens"] > 0 and record["parameters"] > 0


@pytest.mark.slow
def test_the_record_states_the_loss_that_the_weights_give() -> None:
    """The recorded loss again, from the files alone, by plain transformers calls."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model_path()
    record = json.loads((folder / "train.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    window = record["options"]["window"]
    ids: list[int] = []
    for line in heldout_path().read_text(encoding="utf-8").splitlines():
        ids += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], 0]
    rows = torch.tensor(ids).unfold(0, window + 1, window)
    head = record["curve"][-1][2]  # over the first rows, in float32 before the rounding to bf16
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:]).item()
            for row in rows[: record["options"]["eval_rows"]]
        ]
    assert sum(losses) / len(losses) == pytest.approx(head, abs=0.01)


def test_demo_text_and_held_out_text_share_no_file(tmp_path: Path) -> None:
    train, heldout = demo_texts(tmp_path, limit_bytes=300_000)
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    held = [json.loads(line) for line in heldout.read_text(encoding="utf-8").splitlines()]
    assert held and all(is_heldout(row["source"]) for row in held)
    assert not any(is_heldout(row["source"]) for row in rows)
    assert not {row["text"] for row in rows} & {row["text"] for row in held}
    assert 300_000 <= sum(len(row["text"].encode()) for row in rows) < 2_000_000
    again, _ = demo_texts(tmp_path / "again", limit_bytes=300_000)
    assert again.read_bytes() == train.read_bytes()


def test_documents_leave_out_tests_and_third_party_files(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "test/c.py", "site-packages/d.py", "_sysconfigdata_x.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "empty.py").write_text("\n")
    assert [source for source, _ in stdlib_documents(tmp_path)] == ["a.py", "pkg/b.py"]
    with pytest.raises(DataError, match="no Python sources"):
        list(stdlib_documents(tmp_path / "test" / "nothing"))
