"""The teacher's top k on disk: the truncated loss against the textbook, and runs that use the cache."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file
from training import TINY, family, write_text

from mha2gqa.errors import CheckpointError, UsageError
from mha2gqa.lm_head import CHUNK_ELEMENTS, LMHead
from mha2gqa.uptraining import loss as L
from mha2gqa.uptraining import teacher_cache, uptrain
from mha2gqa.uptraining.batches import Collator
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.teacher import Teacher

RUN = {**TINY, "tokens": 64 * 6, "learning_rate": 3e-3, "save_steps": 2}


def bucketed(z, labels, teacher, k, temperature, ce_weight):
    """KL over the teacher's k likeliest tokens and one bucket, written out on whole logits."""
    keep = labels != L.IGNORE_INDEX
    z, labels, teacher = z[keep], labels[keep], teacher[keep]
    width = min(z.shape[1], teacher.shape[1])
    p, q = (F.softmax(x[:, :width] / temperature, -1) for x in (teacher, z))
    best = p.topk(k).indices
    p_k, q_k = p.gather(1, best), q.gather(1, best)
    kl = (p_k * (p_k / q_k).log()).sum()
    if k < width:
        others = torch.ones_like(p).scatter(1, best, 0.0)
        r, s = (p * others).sum(1), (q * others).sum(1)
        kl = kl + (r * (r / s).log()).sum()
    return ce_weight * F.cross_entropy(z, labels, reduction="sum") + (1 - ce_weight) * temperature**2 * kl


@pytest.mark.parametrize("k", [1, 5, 25])
@pytest.mark.parametrize("teacher_vocab", [31, 40, 25])
@pytest.mark.parametrize(("temperature", "ce_weight"), [(1.0, 0.0), (2.5, 0.3)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_truncated_loss_and_gradient(monkeypatch, k, teacher_vocab, temperature, ce_weight, scale, softcap):
    torch.manual_seed(0)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 7 * 31)
    hidden = torch.randn(23, 12, dtype=torch.float64, requires_grad=True)
    module = torch.nn.Linear(12, 31, dtype=torch.float64)
    labels = torch.randint(0, 25, (23,))
    labels[[3, 11]] = L.IGNORE_INDEX
    teacher = 3 * torch.randn(23, teacher_vocab, dtype=torch.float64)
    width = min(31, teacher_vocab)
    best = (teacher[:, :width] / temperature).log_softmax(-1).topk(k)
    cached = L.TopKLogProbs(best.indices, best.values, width)
    spec = L.Objective(True, temperature, ce_weight)
    loss, _ = L.chunked_loss(hidden, labels, spec, head=LMHead(module, scale, softcap), teacher=cached.part)
    got = torch.autograd.grad(loss, [hidden, *module.parameters()])
    z = module(hidden) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    wanted = bucketed(z, labels, teacher, k, temperature, ce_weight)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(got, torch.autograd.grad(wanted, [hidden, *module.parameters()]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_all_tokens_are_the_whole_kl_and_fewer_a_lower_bound():
    torch.manual_seed(0)
    z, teacher, labels = torch.randn(9, 17), 3 * torch.randn(9, 17), torch.zeros(9, dtype=torch.long)
    log_p = teacher.log_softmax(-1)
    spec = L.Objective(True, 1.0, 0.0)
    whole, _ = L.chunked_loss(z, labels, spec, teacher=lambda part: teacher[part])
    found = []
    for k in (1, 2, 4, 8, 16, 17):
        best = log_p.topk(k)
        found.append(float(L.chunked_loss(z, labels, spec, teacher=L.TopKLogProbs(*best[::-1], 17).part)[0]))
    assert found == sorted(found) and found[0] < 0.9 * float(whole)
    assert found[-1] == pytest.approx(float(whole), rel=1e-6)


# --- runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def cached(models, tmp_path_factory) -> tuple[Path, Path]:
    """A finished run with k = 8 and its cache."""
    folder = tmp_path_factory.mktemp("cached")
    result = uptrain(*run(models, folder), teacher_top_k=8, teacher_cache=str(folder / "cache"), **RUN)
    assert result.teacher_cache["computed"] == result.teacher_cache["rows"] > 0
    return folder / "up", folder / "cache"


def run(models, folder: Path) -> tuple[Path, Path, Path]:
    return models[1], folder / "up", models[2]


def no_teacher(*args, **kwargs):
    raise AssertionError("the teacher was loaded")


def equal(a: Path, b: Path, tolerance: float = 0.0) -> bool:
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return x.keys() == y.keys() and all(torch.allclose(x[n], y[n], rtol=0, atol=tolerance) for n in x)


def test_the_whole_vocabulary_trains_like_the_teacher_itself(models, tmp_path):
    own = uptrain(models[1], tmp_path / "own", models[2], **RUN)
    mixed = uptrain(models[1], tmp_path / "up", models[2], teacher_top_k=1000, **RUN)
    assert mixed.teacher_cache["top_k"] == 64 and not (tmp_path / "up.uptrain").exists()
    for a, b in zip(own.losses["train"], mixed.losses["train"], strict=True):
        assert (a["loss"], a["ce_loss"]) == pytest.approx((b["loss"], b["ce_loss"]), abs=1e-5)
    assert equal(tmp_path / "own", tmp_path / "up", 1e-4)
    assert mixed.budget["model_flops"] == pytest.approx(own.budget["model_flops"], rel=0.05)


def test_a_second_run_needs_no_teacher(models, cached, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache, "load_teacher", no_teacher)
    options = {"teacher_top_k": 8, "teacher_cache": str(cached[1])}
    again = uptrain(*run(models, tmp_path), **options, **RUN)
    assert again.teacher_cache["computed"] == 0 and again.teacher_cache["flops"] == 0
    assert equal(tmp_path / "up", cached[0])
    other = uptrain(models[1], tmp_path / "other", models[2], **options, **{**RUN, "learning_rate": 1e-3})
    assert other.teacher_cache["computed"] == 0
    assert not equal(tmp_path / "other", cached[0])


def test_a_longer_run_adds_what_is_missing(models, cached, tmp_path):
    shutil.copytree(cached[1], tmp_path / "cache")
    options = {"teacher_top_k": 8, "teacher_cache": str(tmp_path / "cache")}
    longer = uptrain(*run(models, tmp_path), **options, **{**RUN, "tokens": 64 * 12})
    assert 0 < longer.teacher_cache["computed"] < longer.teacher_cache["rows"]
    fresh = uptrain(models[1], tmp_path / "fresh", models[2], teacher_top_k=8, **{**RUN, "tokens": 64 * 12})
    assert fresh.teacher_cache["computed"] == longer.teacher_cache["rows"]
    assert equal(tmp_path / "up", tmp_path / "fresh")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_top_k": 4}, r"teacher_cache .*train-0: was made with other settings \(top_k: 8 -> 4\)"),
        ({"temperature": 2.0}, r"was made with other settings \(temperature: 1.0 -> 2.0\)"),
        ({"seed": 1}, "was made of other data"),
        ({"streaming": True}, "teacher_top_k: not possible with streaming"),
    ],
)
def test_a_cache_of_something_else_is_refused(models, cached, tmp_path, changes, message):
    options = {"teacher_top_k": 8, "teacher_cache": str(cached[1])} | RUN | changes
    with pytest.raises(UsageError, match=message):
        uptrain(*run(models, tmp_path), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": 3}', '{"rows": "x", "made_of": {}}'])
def test_a_damaged_cache_is_named_with_what_to_do(models, cached, tmp_path, text):
    shutil.copytree(cached[1], tmp_path / "cache")
    path = tmp_path / "cache" / "train-0" / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        uptrain(*run(models, tmp_path), teacher_top_k=8, teacher_cache=str(tmp_path / "cache"), **RUN)
    assert str(caught.value).startswith(f"{path}: ")
    assert f"delete {path.parent}: it is computed again" in str(caught.value)


@pytest.mark.parametrize(
    "more", [1, 2]
)  # the same steps, and twice as many, which would be added behind the gap
def test_a_cache_that_was_cut_is_named_and_never_filled_up(models, cached, tmp_path, more):
    shutil.copytree(cached[1], tmp_path / "cut")
    (file,) = (tmp_path / "cut").rglob("log_probs.bin")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 10)
    options = {
        **RUN,
        "tokens": RUN["tokens"] * more,
        "teacher_top_k": 8,
        "teacher_cache": str(tmp_path / "cut"),
    }
    with pytest.raises(
        CheckpointError, match=r"log_probs\.bin: damaged \(shorter than \d+ rows\); delete .*cut"
    ):
        uptrain(*run(models, tmp_path), **options)


def test_a_cache_of_another_teacher_or_text_is_refused(models, cached, tmp_path):
    options = {"teacher_top_k": 8, "teacher_cache": str(cached[1])}
    teacher = tmp_path / "other"
    pico_llama(initializer_range=0.2).save_pretrained(teacher)
    word_tokenizer(teacher)
    with pytest.raises(UsageError, match=r"was made with other settings \(teacher: '\w+' -> '\w+'\)"):
        uptrain(*run(models, tmp_path), teacher=str(teacher), **options, **RUN)
    with pytest.raises(UsageError, match="was made of other data"):
        uptrain(models[1], tmp_path / "up", write_text(tmp_path / "t.jsonl", seed=3), **options, **RUN)


def test_killed_and_resumed(models, cached, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    accept = SpikeGuard.accept

    def killing(self, at, *args):
        if at == 5:
            raise Killed
        return accept(self, at, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SpikeGuard, "accept", killing)
        with pytest.raises(Killed):
            uptrain(*run(models, tmp_path), teacher_top_k=8, **RUN)
    monkeypatch.setattr(teacher_cache, "load_teacher", no_teacher)
    assert uptrain(*run(models, tmp_path), teacher_top_k=8, **RUN).resumed_from == 4
    assert equal(tmp_path / "up", cached[0])


def test_an_interrupted_cache_goes_on(models, cached, tmp_path, monkeypatch):
    top, asked = teacher_cache.TeacherCache._top, []

    def tiring(self, *args):
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return top(self, *args)

    monkeypatch.setattr(teacher_cache, "SAVED_ROWS_BYTES", 1)
    monkeypatch.setattr(teacher_cache.TeacherCache, "_top", tiring)
    options = {"teacher_top_k": 8, "teacher_cache": str(tmp_path / "cache")} | RUN
    with pytest.raises(KeyboardInterrupt):
        uptrain(*run(models, tmp_path), **options)
    result = uptrain(*run(models, tmp_path), **options)
    assert result.teacher_cache["computed"] == result.teacher_cache["rows"] - 3 * 4
    assert equal(tmp_path / "up", cached[0])


def test_disk_too_small(models, tmp_path, monkeypatch):
    from mha2gqa.checkpoints import output

    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"GB needed, 0\.0 GB free"):
        uptrain(*run(models, tmp_path), teacher_top_k=8, **RUN)


def test_sources_have_caches_of_their_own(models, tmp_path):
    few = write_text(tmp_path / "few.jsonl", documents=12, seed=9)
    options = {**RUN, "data_weights": (3.0, 1.0)}
    own = uptrain(models[1], tmp_path / "own", [models[2], few], **options)
    result = uptrain(
        models[1],
        tmp_path / "up",
        [models[2], few],
        teacher_top_k=64,
        teacher_cache=str(tmp_path / "cache"),
        **options,
    )
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["train-0", "train-1"]
    for a, b in zip(own.losses["train"], result.losses["train"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_two_runs_that_fill_one_cache_do_not_spoil_it(tmp_path):
    """Both found it empty: the second must neither cut what the first reads nor ask for it again."""
    identity = teacher_cache.Identity("t", 4, 1.0, 64, 16, False, "float32")
    blocks = torch.randint(0, 64, (6, 17), generator=torch.Generator().manual_seed(0)).numpy()
    teacher, device = Teacher(pico_llama()), torch.device("cpu")
    one, two = (teacher_cache.TeacherCache(tmp_path / "cache", identity) for _ in range(2))
    assert one.missing(blocks) == two.missing(blocks) == 6
    assert one.fill(blocks, teacher, Collator(), 2, device) == 6
    before = {name: x.clone() for name, x in one.read(range(6)).items()}
    held = one._map("log_probs")  # a run that reads while the other opens the files
    assert two.fill(blocks, teacher, Collator(), 2, device) == 0
    assert two.rows == 6 and float(held[5].sum()) == pytest.approx(
        float(before["teacher_log_probs"][5].sum())
    )
    for name, values in two.read(range(6)).items():
        assert torch.equal(values, before[name])
    with one._alone(), (tmp_path / "cache" / "lock").open("a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
