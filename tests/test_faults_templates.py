"""A chat template is a program that comes with a model: whatever it does ends as one line, in bounded time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import word_tokenizer

from mha2gqa.data import chat_limits
from mha2gqa.data.chat import encode_chats
from mha2gqa.data.chat_limits import Watch
from mha2gqa.data.reading import Document
from mha2gqa.errors import DataError

CHAT = ({"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"})
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def encoded(folder: Path, template: str, assistant_only: bool = False) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    word_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    documents = [Document("", messages=CHAT, source="chats.jsonl:1")]
    return list(encode_chats(tokenizer, documents, assistant_only))


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "{{ x }", "{{ raise_exception('no') }}", "{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ messages[7].content }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 5) }}", "{{ 9**9**9 }}",
    ],
)  # fmt: skip
def test_a_template_that_fails_is_one_line(tmp_path: Path, body: str, marks: bool) -> None:
    template = f"{{% generation %}}{body}{{% endgeneration %}}" if marks else body
    with pytest.raises(DataError) as caught:
        encoded(tmp_path, template, marks)
    said = str(caught.value)
    assert "chat template" in said and "\n" not in said and len(said) <= 400


@pytest.mark.parametrize("marks", [False, True])
def test_a_template_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: bool
) -> None:
    monkeypatch.setattr(chat_limits, "SECONDS", 0.5)
    began = time.monotonic()
    template = f"{{% generation %}}{LOOPS}{{% endgeneration %}}" if marks else LOOPS
    with pytest.raises(DataError, match="takes more than"):
        encoded(tmp_path, template, marks)
    assert time.monotonic() - began < 60  # it has no end


def test_a_template_that_fills_the_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "BYTES", 64 << 20)
    grows = "{% set x = ['a' * 1000000] %}{% for i in range(99999) %}{{ x[0] ~ i }}{% endfor %}"
    with pytest.raises(DataError, match="takes more than"):
        encoded(tmp_path, grows)


def test_templates_that_end_are_left_alone(tmp_path: Path) -> None:
    plain = encoded(tmp_path, "{% for m in messages %}{{ m.content }} {% endfor %}")
    (ids,) = plain
    assert len(ids) == 4
    assert not any(thread.name == "chat template watch" for thread in threading.enumerate())


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}"])
def test_stars_of_a_text_are_no_power(tmp_path: Path, mark: str) -> None:
    body = "{% for m in messages %}**w5** " + mark + "{{ m.content }}{% endgeneration %} {% endfor %}"
    (ids,) = encoded(tmp_path, body, assistant_only=True)
    assert len(ids) > 4


def test_a_watch_ends_with_its_block() -> None:
    before = threading.active_count()
    with Watch() as watch, watch.over("x"):
        pass
    for _ in range(50):
        if threading.active_count() <= before:
            return
        time.sleep(0.1)
    raise AssertionError("its thread goes on")


def test_a_watch_is_of_the_thread_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "SECONDS", 0.3)
    said: list[Any] = []

    def work(watch: Watch) -> None:
        try:
            with watch.over("chats.jsonl:3"):
                while True:
                    pass
        except DataError as error:
            said.append(str(error))

    with Watch() as watch:
        thread = threading.Thread(target=work, args=(watch,))
        thread.start()
        thread.join(60)
    assert said and said[0].startswith("chats.jsonl:3: the chat template takes more than")
