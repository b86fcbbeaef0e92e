"""What goes with a result and what stays behind; what a published folder says of this machine: nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from conftest import word_tokenizer
from training import write_text

from mha2gqa import uptrain
from mha2gqa.checkpoints.manifest import MANIFEST, read_manifest, without_paths
from mha2gqa.checkpoints.output import publish
from mha2gqa.checkpoints.side_files import KNOWN, find_side_files
from mha2gqa.commands.push import push
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, Mha2gqaError, UsageError
from mha2gqa.report.terminal import render

ROOT = Path(__file__).parents[1]


def visible(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts}


def test_known_files_are_copied_byte_for_byte_and_others_are_named(pico: Path, tmp_path: Path) -> None:
    (pico / "chat_template.jinja").write_bytes(b"{{ x }}\r\n\xff")
    (pico / "additional_chat_templates").mkdir()
    (pico / "additional_chat_templates" / "tool.jinja").write_text("t")
    for name in (
        "README.md",
        "LICENSE",
        "USE_POLICY.md",
        "tokenizer.model",
        "spiece.model",
        "source.spm",
        "qwen.tiktoken",
    ):
        (pico / name).write_text(name)
    known = visible(pico)
    (pico / "nested").mkdir()
    for name in (
        "notes.txt",
        "nested/extra.txt",
        "optimizer.pt",
        "consolidated.00.pth",
        ".netrc",
        "training_args.bin",
    ):
        (pico / name).write_bytes(b"x")
    os.mkfifo(pico / "pipe")
    result = convert(pico, tmp_path / "out", 2)
    card = {"README.md": "README.base.md"}  # our own stands in its place
    assert visible(tmp_path / "out") == known | {MANIFEST, *card.values()}
    for name in known - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / card.get(name, name)).read_bytes() == (pico / name).read_bytes()
    assert [w for w in result.warnings if "not copied" in w] == [
        "not copied, since nothing is known of them: nested/extra.txt, notes.txt, pipe (--keep GLOB takes them along)"
    ]
    kept = convert(pico, tmp_path / "kept", 2, keep=["nested/*", "notes.txt"])
    assert visible(tmp_path / "kept") == known | {MANIFEST, *card.values(), "nested/extra.txt", "notes.txt"}
    assert [w for w in kept.warnings if "not copied" in w] == [
        "not copied, since nothing is known of them: pipe (--keep GLOB takes them along)"
    ]
    convert(tmp_path / "kept", tmp_path / "again", 1)  # what was kept once is kept again
    assert "nested/extra.txt" in visible(tmp_path / "again")
    for pattern, said in (
        ("none*", "names no file"),
        ("*.pth", "names weights"),
        ("pipe", "not a regular file"),
    ):
        with pytest.raises(Mha2gqaError, match=said):
            convert(pico, tmp_path / "no", 2, keep=[pattern])


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    for kind, patterns in KNOWN.items():
        assert f"| {kind} | {', '.join(f'`{p}`' for p in patterns)} |" in text


def test_code_that_the_config_names_goes_along_with_what_it_imports(pico: Path, tmp_path: Path) -> None:
    config = json.loads((pico / "config.json").read_text())
    named = {
        "AutoConfig": "configuration_x.X",
        "AutoModel": "org/repo--modeling_y.Y",
        "AutoTokenizer": [None, "tok_x.T"],
    }
    (pico / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    (pico / "configuration_x.py").write_text("from .helper import a\nimport os\n")
    (pico / "helper.py").write_text("from .deep import b\n")
    for name in ("deep.py", "tok_x.py", "modeling_y.py", "setup.py"):
        (pico / name).write_text("")
    found = find_side_files(pico, config | {"auto_map": named})
    assert {n for n in found.copied if n.endswith(".py")} == {
        "configuration_x.py",
        "helper.py",
        "deep.py",
        "tok_x.py",
    }
    assert {n for n in found.left if n.endswith(".py")} == {"modeling_y.py", "setup.py"}


def test_no_link_out_of_the_folder_is_followed(pico: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hf_SECRET")
    (tmp_path / "outside").mkdir()
    for name, target in (
        ("notes.txt", "/proc/self/environ"),
        ("tokenizer.model", "../secret"),
        ("LICENSE", str(tmp_path / "secret")),
        ("vocab.txt", "/dev/zero"),
        ("folder", str(tmp_path / "outside")),
    ):
        (pico / name).symlink_to(target)
    (pico / "merges.txt").symlink_to("config.json")  # inside: followed
    result = convert(pico, tmp_path / "out", 2, keep=["*.txt"])
    assert visible(tmp_path / "out") == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "README.md",
        MANIFEST,
    }
    told = [w for w in result.warnings if "links out of the folder" in w]
    assert told == [
        "not copied, since they are links out of the folder: LICENSE, folder, notes.txt, tokenizer.model, vocab.txt"
    ]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(pico / "spm.model"))
        with pytest.raises(CheckpointError, match=r"spm\.model: not a regular file"):
            convert(pico, tmp_path / "no", 2)


@pytest.mark.parametrize(
    "target", ["/proc/self/environ", "/dev/zero", "/dev/null", "/sys/kernel/uevent_seqnum"]
)
def test_weights_are_no_files_of_the_system(pico: Path, tmp_path: Path, target: str) -> None:
    (pico / "model.safetensors").unlink()
    (pico / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match=f"a link to '{target.replace('self', '.*')}'"):
        convert(pico, tmp_path / "out", 2)


def test_the_hubs_cache_and_linked_weights_stay_usable(pico: Path, tmp_path: Path) -> None:
    (pico / "README.md").write_text("card")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(pico.iterdir())):
        shutil.copy(file, blobs / f"{i:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040}")
    convert(snapshot, tmp_path / "out", 2)
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*")) and "README.md" in visible(
        tmp_path / "out"
    )
    (tmp_path / "far").mkdir()
    shutil.move(pico / "model.safetensors", tmp_path / "far" / "weights")
    (pico / "model.safetensors").symlink_to(tmp_path / "far" / "weights")
    (tmp_path / "link").symlink_to(pico)
    convert(tmp_path / "link", tmp_path / "out2", 2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", b'{"do_sample": true.\n', "not valid JSON"),
        ("generation_config.json", b"", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("tokenizer.json", None, "a link to 'blob', which does not exist"),
    ],
)
def test_files_that_publishing_needs_are_asked_before_the_work(
    pico: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    (pico / name).unlink(missing_ok=True)
    if content is None:
        (pico / name).symlink_to("blob")
    else:
        (pico / name).write_bytes(content)
    statistics = tmp_path / "s.safetensors"
    with pytest.raises(CheckpointError, match=said) as caught:
        convert(
            pico,
            tmp_path / "out",
            2,
            calibration=[str(write_text(tmp_path / "t.jsonl"))],
            statistics=str(statistics),
        )
    assert str(pico / name) in str(caught.value) and not statistics.exists()


# --- what is uploaded ------------------------------------------------------------------------------------


@pytest.fixture
def converted(pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion of an absolute path, calibrated on an absolute path, into a folder beside it."""
    word_tokenizer(pico)
    (tmp_path / "data").mkdir()
    text = write_text(tmp_path / "data" / "text.jsonl")
    convert(
        pico,
        tmp_path / "out",
        2,
        calibration=[str(text)],
        calibration_tokens=512,
        refit=True,
        reconstruct=False,
    )
    return tmp_path / "out"


def test_what_is_pushed_says_nothing_of_this_machine(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123456789")
    listed = push(converted, "org/name", dry_run=True)
    assert MANIFEST in listed.files and not any(".cache" in name for name in listed.files)
    for name in listed.files:
        data = (converted / name).read_bytes()
        assert str(tmp_path).encode() not in data and b"hf_abc" not in data, name
    manifest = json.loads((converted / MANIFEST).read_text())
    assert manifest["source_path"] == "../pico" and manifest["source"] == "pico"
    assert read_manifest(converted)["source_path"] == str(tmp_path / "pico")
    assert read_manifest(converted)["calibration"]["texts"] == [str(tmp_path / "data" / "text.jsonl")]


def test_what_is_pushed_is_the_model_alone(converted: Path) -> None:
    strays = (
        "train.json", "events.out.tfevents.1", "notes.txt", "checkpoint-5/model.safetensors", "wandb/run.log",
        "adapter/events.out", "runs/a[1].txt",
    )  # fmt: skip
    for name in (*strays, "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "LICENSE"):
        (converted / name).parent.mkdir(exist_ok=True)
        (converted / name).write_text("{}")
    (converted / "secret").symlink_to("/etc/hostname")
    listed = push(converted, "org/name", dry_run=True)
    assert listed.left == sorted((*strays, "secret"))
    assert {"model.safetensors", "config.json", MANIFEST, "tokenizer.json", "README.md", "LICENSE"} <= set(
        listed.files
    )
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(listed.files)
    assert listed.to_dict()["left"] == listed.left
    assert "not part of the model, not uploaded: adapter/events.out" in render(listed.to_dict())


@pytest.mark.parametrize("lost", [(), (".cache",)])
def test_uptrain_finds_its_teacher(converted: Path, tmp_path: Path, lost: tuple[str, ...]) -> None:
    for name in lost:
        shutil.rmtree(converted / name)
    text = tmp_path / "data" / "text.jsonl"
    options = {"tokens": 512, "window": 32, "batch_tokens": 128, "holdout": 0.0, "device": "cpu"}
    result = uptrain(converted, tmp_path / "up", str(text), **options)
    assert result.teacher == str(tmp_path / "pico")
    for name in visible(tmp_path / "up"):
        assert str(tmp_path).encode() not in (tmp_path / "up" / name).read_bytes(), name
    (tmp_path / "pico").rename(tmp_path / "moved")
    with pytest.raises(
        UsageError, match=r'cannot be opened: .*pico: is not here; give teacher=PATH .*teacher="none"'
    ):
        uptrain(converted, tmp_path / "up2", str(text), **options)
    assert uptrain(converted, tmp_path / "up", str(text), **options).finished_before
    assert uptrain(converted, tmp_path / "up3", str(text), teacher=str(tmp_path / "moved"), **options).teacher


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/srv/models/llama", "llama"),
        ("~/models/llama", "llama"),
        ("/with space/my model", "my model"),
        ("org/name", "org/name"),
        ("../models/llama", "../models/llama"),
        ("see https://huggingface.co/org/name/tree/main", "see https://huggingface.co/org/name/tree/main"),
        ("the file /a/b/c.jsonl: 3 lines, /d/e too", "the file c.jsonl: 3 lines, e too"),
        ("tokens/s and 3/4 of 1/2", "tokens/s and 3/4 of 1/2"),
        ("", ""),
    ],
)
def test_paths_are_cut_down_to_their_last_part(text: str, public: str) -> None:
    assert without_paths(text) == public


def test_an_output_place_is_asked_before_the_work(pico: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for out, said in (
        ("link", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
        ("file", "is a file"),
        ("file/out", "is not a folder"),
        ("dangling/out", "is not a folder"),
        ("x" * 250, "too long"),
        ("x" * 300, "too long"),
        ("x/" * 2200 + "out", "too long"),
        ("a\0b", "is not a valid name"),
        ("\ud800", "is not a valid name"),
        ("b\udcff", "is not a valid name"),  # bytes that are no UTF-8, which safetensors does not write
        ("..", "is not a valid name"),
        ("pico/out", "inside SOURCE"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            convert(pico, tmp_path / out, 2)
        assert len(str(caught.value)) <= 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "file", "link", "pico", "real"]


def test_a_folder_that_appears_during_the_work_is_left_alone_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(CheckpointError, match=r"out: has appeared meanwhile, of another process; nothing was"),
        publish(out) as folder,
    ):
        (folder / "ours").touch()
        out.mkdir()
        (out / "theirs").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "theirs"]
