"""Chats: the model's template, loss on what the assistant says, and nothing guessed where it cannot be told."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import word_tokenizer
from training import TINY, family

from mha2gqa.checkpoints.loading import load_tokenizer
from mha2gqa.data import Document
from mha2gqa.data.chat import encode_chats, hide, unhide
from mha2gqa.errors import DataError, UsageError
from mha2gqa.uptraining import uptrain

PLAIN = (
    "{% for m in messages %}{{ 'w0 ' if m.role == 'user' else 'w1 ' }}{{ m.content }}{{ ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w1 ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ 'w0 ' if m.role == 'user' else 'w1 ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ ' <eos>' }}{% endgeneration %}{% else %}{{ m.content }}{{ ' <eos>' }}"
    "{% endif %}{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w1 ' }}{% endif %}"
)
# Drops what the assistant said before the last turn, as templates of reasoning models do.
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else 'w2' }}")
CHAT = (
    {"role": "user", "content": "w10 w11"},
    {"role": "assistant", "content": "w20 w21 w22"},
    {"role": "user", "content": "w12"},
    {"role": "assistant", "content": "w23"},
)


def with_template(folder: Path, template: str | None):
    tokenizer = load_tokenizer(word_tokenizer(folder))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_assistants_words_carry_loss(tmp_path, template):
    tokenizer = with_template(tmp_path, template)
    (stored,) = encode_chats(tokenizer, [Document("", "chats:1", CHAT)])
    ids, spoken = unhide(stored)
    said = [
        "w0",
        "w10",
        "w11",
        "<eos>",
        "w1",
        "[w20",
        "w21",
        "w22",
        "<eos>]",
        "w0",
        "w12",
        "<eos>",
        "w1",
        "[w23",
        "<eos>]",
    ]
    words = [word.strip("[]") for word in said]
    inside, expected = False, []
    for word in said:
        inside = inside or word.startswith("[")
        expected.append(inside)
        inside = inside and not word.endswith("]")
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == words
    assert spoken.tolist() == expected
    (everything,) = encode_chats(tokenizer, [Document("", "chats:1", CHAT)], assistant_only=False)
    assert unhide(everything)[1].tolist() == [False] + [True] * (len(words) - 1)


def test_what_cannot_be_told_is_refused(tmp_path):
    chats = [Document("", "chats.jsonl:7", CHAT)]
    with pytest.raises(DataError, match=r"chats.jsonl:7: .*writes earlier turns differently"):
        list(encode_chats(with_template(tmp_path, FORGETFUL), chats))
    assert list(encode_chats(with_template(tmp_path, FORGETFUL), chats, assistant_only=False))
    with pytest.raises(DataError, match="no chat template"):
        list(encode_chats(with_template(tmp_path, None), chats))
    with pytest.raises(DataError, match=r"a text among chats"):
        list(encode_chats(with_template(tmp_path, PLAIN), [Document("w1", "mixed.jsonl:2")]))
    with pytest.raises(DataError, match=r"chats.jsonl:9: the chat template rejects it"):
        odd = PLAIN.replace("{% for m", "{{ raise_exception('roles must alternate') }}{% for m")
        list(encode_chats(with_template(tmp_path, odd), [Document("", "chats.jsonl:9", CHAT)]))


def test_hidden_ids_come_back():
    ids = np.array([0, 5, 0, 7])
    spoken = np.array([False, True, True, False])
    assert hide(ids, spoken).tolist() == [-1, 5, 0, -8]
    back, mask = unhide(hide(ids, spoken))
    assert np.array_equal(back, ids) and np.array_equal(mask, spoken)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chat")
    original, student, _ = family(folder)
    for path in (original, student):
        tokenizer = load_tokenizer(path)
        tokenizer.chat_template = PLAIN
        tokenizer.save_pretrained(path)
    rng = random.Random(0)
    chats = folder / "chats.jsonl"
    with chats.open("w") as file:
        for _ in range(60):
            turns = []
            for _ in range(rng.randrange(1, 4)):
                start = rng.randrange(50)
                turns.append({"role": "user", "content": f"w{start}"})
                turns.append({"role": "assistant", "content": " ".join(f"w{start + i}" for i in range(1, 6))})
            file.write(json.dumps({"messages": turns}) + "\n")
    return student, chats


@pytest.mark.parametrize("streaming", [False, True])
def test_a_chat_model_is_uptrained_on_chats(models, tmp_path, streaming):
    student, chats = models
    options = {**TINY, "text_column": "messages", "streaming": streaming, "learning_rate": 3e-3}
    for name, teacher in (("distilled", None), ("plain", "none")):
        result = uptrain(student, tmp_path / name, chats, tokens=64 * 15, teacher=teacher, **options)
        losses = [e["loss"] for e in result.losses["train"]]
        assert losses[-1] < losses[0]
        scored = result.losses["held_out"][0]["eval_tokens"]
        assert scored > 0 and scored % 16  # labelled tokens only, not whole blocks
        assert (tmp_path / name / "chat_template.jinja").exists()
    whole = uptrain(student, tmp_path / "all", chats, tokens=64 * 2, assistant_only_loss=False, **options)
    assert whole.losses["held_out"][0]["eval_tokens"] > scored


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_without_an_assistant_teach_nothing(models, tmp_path, streaming):
    """It used to end well, with every step skipped and a held-out loss of 0."""
    asked = tmp_path / "asked.jsonl"
    with asked.open("w") as file:
        for i in range(60):
            file.write(json.dumps({"messages": [{"role": "user", "content": f"w{i % 57} w1 w2 w3"}]}) + "\n")
    options = {**TINY, "text_column": "messages", "streaming": streaming, "tokens": 64 * 3}
    with pytest.raises(DataError, match="assistant_only_loss false"):
        uptrain(models[0], tmp_path / "up", asked, **options)
    assert not (tmp_path / "up").exists()
    whole = uptrain(models[0], tmp_path / "whole", asked, assistant_only_loss=False, **options)
    assert not whole.unlabelled_steps and whole.losses["held_out_start"] > 0
    mixed = uptrain(models[0], tmp_path / "mixed", models[1], eval_data=None, **options)
    assert mixed.losses["held_out_start"] > 0
    with pytest.raises(DataError, match="eval_data: no token of these chats is an assistant's"):
        uptrain(models[0], tmp_path / "scored", models[1], eval_data=str(asked), **options)


def test_chats_are_not_isolated(models, tmp_path):
    student, chats = models
    with pytest.raises(UsageError, match="isolate_documents: cannot be used with chats"):
        uptrain(
            student,
            tmp_path / "up",
            chats,
            tokens=640,
            text_column="messages",
            isolate_documents=True,
            **TINY,
        )
