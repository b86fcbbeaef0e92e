"""Evaluation against brute force: one forward pass per token, by each protocol's definition."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import pico_llama, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mha2gqa import lm_head
from mha2gqa.data import Document, token_blocks
from mha2gqa.errors import CheckpointError, DataError, GateError, UsageError
from mha2gqa.evaluation import (
    PROTOCOLS,
    EvaluateConfig,
    EvaluateResult,
    LoadedModel,
    Settings,
    batching,
    block_loss,
    bootstrap,
    check_gates,
    check_limits,
    evaluate,
    paired_test,
    perplexity_ratio,
    scoring,
)

LENGTHS = [1, 4, 23, 0, 12, 40, 2, 17]


def text_of(length: int, seed: int = 0) -> str:
    rng = np.random.default_rng([length, seed])
    return " ".join(f"w{i}" for i in rng.integers(0, 57, length))


def documents(lengths: list[int], seed: int = 0) -> list[Document]:
    return [Document(text_of(n, seed + i), f"d:{i}") for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t"), bos=True))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return pico_llama()


def bigram(**changes: object) -> torch.nn.Module:
    model = pico_llama(**changes)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


@torch.no_grad()
def next_nll(model: torch.nn.Module, context: list[int], target: int) -> float:
    """-log p(target | context), the context alone in a batch of one."""
    logits = model(torch.tensor([context])).logits[0, -1].double()
    return float(-torch.log_softmax(logits, -1)[target])


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def by_definition_window(
    model: torch.nn.Module, ids: list[int], window: int, stride: int, bos: int | None
) -> list[float]:
    """Target i is predicted by the first window, starting at a multiple of the stride, that reaches it."""
    head = [] if bos is None else [bos]
    room = window - len(head)
    losses = []
    for i in range(1 - len(head), len(ids)):
        begin = 0 if i <= room else stride * math.ceil((i - room) / stride)
        losses.append(next_nll(model, head + ids[begin:i], ids[i]))
    return losses


def run(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, docs: list[Document], **options: object):
    return evaluate(LoadedModel("m", model, tokenizer), docs, device="cpu", **options)


# --- protocols against their definitions ---------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    window=st.sampled_from([2, 5, 8, 16, 64]),
    stride=st.integers(1, 64),
    batch_size=st.sampled_from([1, 2, 7]),
    bos=st.booleans(),
    side=st.sampled_from(["left", "right"]),
)
def test_window_equals_brute_force(
    model: torch.nn.Module,
    plain: PreTrainedTokenizerBase,
    with_bos: PreTrainedTokenizerBase,
    lengths: list[int],
    window: int,
    stride: int,
    batch_size: int,
    bos: bool,
    side: str,
) -> None:
    tokenizer = with_bos if bos else plain
    tokenizer.padding_side = side
    docs, stride = documents(lengths), min(stride, window)
    losses = [
        x
        for d in docs
        for x in by_definition_window(model, ids_of(tokenizer, d.text), window, stride, 2 if bos else None)
    ]
    options = {"window": window, "stride": stride, "batch_size": batch_size}
    if not losses:
        with pytest.raises(DataError, match="nothing can be scored"):
            run(model, tokenizer, docs, **options)
        return
    result = run(model, tokenizer, docs, **options).models[0]
    assert result.tokens == len(losses)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("window", [1, 8, 33])
@pytest.mark.parametrize("bos", [False, True])
def test_blocks_equal_brute_force(
    model: torch.nn.Module, request: pytest.FixtureRequest, window: int, batch_size: int, bos: bool
) -> None:
    tokenizer = request.getfixturevalue("with_bos" if bos else "plain")
    docs = documents(LENGTHS)
    head = [2] if bos else []
    stream = [i for d in docs for i in [*head, *ids_of(tokenizer, d.text), 0]]
    count = (len(stream) - 1) // window
    losses = [
        next_nll(model, stream[b * window : b * window + j], stream[b * window + j])
        for b in range(count)
        for j in range(1, window + 1)
    ]
    result = run(model, tokenizer, docs, protocol="blocks", window=window, batch_size=batch_size)
    assert result.models[0].tokens == count * window == len(losses)
    assert result.models[0].loss == pytest.approx(np.mean(losses), rel=1e-6)
    blocks = token_blocks(tokenizer, [d.text for d in docs], window)
    assert block_loss(model, blocks, batch_size) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("window", [4, 16, 64])
def test_rolling_equals_lm_evals_definition(
    model: torch.nn.Module, request: pytest.FixtureRequest, window: int, bos: bool
) -> None:
    """Disjoint windows of `window` targets after BOS or EOS; the last sees `window` inputs."""
    tokenizer = request.getfixturevalue("with_bos" if bos else "plain")
    docs = documents(LENGTHS)
    losses = []
    for d in docs:
        ids = [2 if bos else 0, *ids_of(tokenizer, d.text)]
        targets = len(ids) - 1
        for i in range(1, targets + 1):
            start = (i - 1) // window * window  # inputs of a full window are ids[start : start + window]
            if start + window > targets:
                start = max(0, targets - window)
            losses.append(next_nll(model, ids[start:i], ids[i]))
    result = run(model, tokenizer, docs, protocol="rolling", window=window, batch_size=3).models[0]
    assert result.tokens == len(losses) == sum(LENGTHS)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-6)
    words = sum(len(re.split(r"\s+", d.text)) for d in docs if d.text)
    assert result.words == words and result.bytes == sum(len(d.text) for d in docs)
    assert result.word_perplexity == pytest.approx(math.exp(np.sum(losses) / words))


@pytest.mark.parametrize("bos", [False, True])
def test_wikitext2_is_the_literatures_loop(
    model: torch.nn.Module, request: pytest.FixtureRequest, bos: bool, tmp_path: Path
) -> None:
    tokenizer = request.getfixturevalue("with_bos" if bos else "plain")
    file = tmp_path / "wiki.test.raw"
    file.write_text("".join(f" {text_of(n)} \n \n" for n in (9, 30, 14)))
    lines = file.read_text().splitlines(keepends=True)
    text = "\n\n".join(line if line.strip() else "" for line in lines)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    seqlen, losses = 16, []
    for i in range(ids.numel() // seqlen):
        batch = ids[:, i * seqlen : (i + 1) * seqlen]
        with torch.no_grad():
            logits = model(batch).logits[:, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    expected = torch.stack(losses).mean().exp().item()
    result = evaluate(
        LoadedModel("m", model, tokenizer),
        file,
        protocol="wikitext2",
        window=seqlen,
        batch_size=2,
        device="cpu",
    )
    assert result.models[0].perplexity == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def blind() -> torch.nn.Module:
    return bigram()


@pytest.fixture(scope="module")
def full_pass(blind: torch.nn.Module, plain: PreTrainedTokenizerBase) -> float:
    return run(blind, plain, documents([57, 5, 33]), window=128).models[0].loss


@settings(max_examples=15, deadline=None)
@given(window=st.integers(1, 70), stride=st.integers(1, 70), batch_size=st.integers(1, 9))
def test_a_bigram_model_is_blind_to_windows(
    blind: torch.nn.Module,
    full_pass: float,
    plain: PreTrainedTokenizerBase,
    window: int,
    stride: int,
    batch_size: int,
) -> None:
    options = {"window": window, "stride": min(stride, window), "batch_size": batch_size}
    result = run(blind, plain, documents([57, 5, 33]), **options)
    assert result.models[0].loss == pytest.approx(full_pass, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["window", "blocks", "rolling"]),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    window=st.integers(1, 20),
    stride=st.integers(1, 20),
    bos=st.booleans(),
    limit=st.none() | st.integers(1, 100),
)
def test_every_token_is_scored_once_with_its_bytes(
    plain: PreTrainedTokenizerBase,
    name: str,
    lengths: list[int],
    window: int,
    stride: int,
    bos: bool,
    limit: int | None,
) -> None:
    docs = documents(lengths)
    options = Settings(window, min(stride, window), 2 if bos else None, limit)
    try:
        windows = list(PROTOCOLS[name](plain, docs, options))
    except DataError:
        assert name == "blocks"
        return
    targets = [i for w in windows for i in w.ids[1 + w.first :].tolist()]
    head = [2] if bos and name == "blocks" else []
    tail = [0] if name == "blocks" else []
    expected = [ids for d in docs for ids in [[*head, *ids_of(plain, d.text), *tail]]]
    if name == "blocks":
        stream = [i for ids in expected for i in ids][1:]
    else:
        stream = [i for ids in expected for i in (ids if bos or name == "rolling" else ids[1:])]
    if limit is not None:
        stream = stream[:limit]
    if name == "blocks":
        stream = stream[: len(stream) // window * window]
    assert targets == stream
    assert all(1 <= w.scored <= len(w.ids) - 1 <= window for w in windows)
    if name == "window" and stride <= window:
        late = [w for w in windows if w.first > (1 if bos else 0)]
        assert all(w.first >= window - options.stride for w in late)
    if limit is None and name != "blocks":
        text = "".join(d.text for d in docs)
        lost = sum(len(d.text.split(" ")[0]) for d in docs if d.text) if name == "window" and not bos else 0
        assert sum(w.bytes for w in windows) == len(text) - lost


def test_bytes_and_words_of_what_is_scored(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    text = "  w1 naïve   — w2\n"
    docs = [Document(text, "d:0")]
    (all_of_it,) = PROTOCOLS["rolling"](plain, docs, Settings(64, 64))
    assert all_of_it.bytes == len(text.encode())
    (rest,) = PROTOCOLS["window"](plain, docs, Settings(64, 64))
    assert rest.bytes == len(text.encode()) - len("  w1") and rest.words == 3


# --- the output head -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("mixtral", {"num_local_experts": 2}),
        ("phi", {}),
        ("gpt_neox", {}),
        ("gpt2", {}),
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
        ("bloom", {}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}),
    ],
)
def test_sliced_head_equals_all_logits(
    model_type: str, changes: dict, plain: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CONFIG_MAPPING[model_type](
        **{
            **sizes,
            "num_key_value_heads": 4,
            "vocab_size": 64,
            "pad_token_id": 0,
            "eos_token_id": 0,
            **changes,
        }
    )
    net = AutoModelForCausalLM.from_config(config).eval()
    blocks = torch.randint(1, 60, (3, 13))
    with torch.no_grad():
        logits = net(blocks[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).item()
    monkeypatch.setitem(scoring.LOGIT_ELEMENTS, "cpu", 64 * 5)  # five positions a slice
    assert block_loss(net, blocks, 2) == pytest.approx(expected, rel=1e-6)
    if model_type in ("llama", "gemma2", "cohere", "granite", "phi", "gpt_neox", "gpt2"):
        assert scoring.Scorer(net).head is not None
    monkeypatch.setattr(lm_head, "find_lm_head", lambda model: None)
    assert block_loss(net, blocks, 2) == pytest.approx(expected, rel=1e-6)


def test_logits_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = pico_llama()
    monkeypatch.setitem(scoring.LOGIT_ELEMENTS, "cpu", 64 * 5)
    widths = []
    net.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.numel() // 64))
    block_loss(net, torch.randint(0, 64, (4, 33)), 4)
    assert max(widths[1:]) == 5 and sum(widths[1:]) == 4 * 32  # the first belongs to the check


def test_block_loss_leaves_the_mode_as_found() -> None:
    net = pico_llama(attention_dropout=0.5).train()
    blocks = torch.randint(0, 64, (2, 9))
    assert block_loss(net, blocks) == block_loss(net, blocks) and net.training


def test_encoder_decoder_windows() -> None:
    """The seam for sequence-to-sequence objectives: windows that carry what the encoder reads."""
    from transformers import T5Config, T5ForConditionalGeneration

    from mha2gqa.evaluation.protocols import Window

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    config.decoder_start_token_id = 0
    net = T5ForConditionalGeneration(config).eval()
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(3, 60, n), rng.integers(3, 60, m)) for n, m in ((5, 3), (9, 7), (4, 8))]
    losses = []
    for source, target in pairs:
        with torch.no_grad():
            out = net(input_ids=torch.tensor(source)[None], labels=torch.tensor(target)[None])
        losses.append(out.loss.item() * len(target))
    windows = [
        Window(np.array([0, *target], dtype=np.int32), 0, i, "", encoder=source.astype(np.int32))
        for i, (source, target) in enumerate(pairs)
    ]
    scored = scoring.score_batches(scoring.Scorer(net), batching.make_batches(windows, 3, 20))
    total = sum(float(s.nll.double().sum()) for _, s in scored)
    assert total == pytest.approx(sum(losses), rel=1e-5)


# --- several models ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saved models with the same tokenizer; the second is the first, slightly disturbed."""
    folders = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    net = pico_llama()
    for folder in folders:
        net.save_pretrained(folder)
        word_tokenizer(folder)
        with torch.no_grad():
            for layer in net.model.layers:
                layer.self_attn.v_proj.weight.add_(torch.randn_like(layer.self_attn.v_proj.weight) * 0.2)
    return folders


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("c") / "valid.jsonl"
    texts = [text_of(5 + 7 * i % 60, i) for i in range(40)]
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return file


@pytest.fixture(scope="module")
def compared(pair: tuple[Path, Path], corpus: Path) -> EvaluateResult:
    return evaluate(pair, corpus, window=32, device="cpu", against=pair[0])


def test_result_has_the_keys_of_the_plan(compared: EvaluateResult, pair: tuple[Path, Path]) -> None:
    out = json.loads(json.dumps(compared.to_dict()))
    assert {"schema_version", "command", "versions", "protocol", "data", "models"} <= out.keys()
    assert out["command"] == "evaluate" and out["protocol"] == "window"
    assert out["settings"] == {
        "window": 32,
        "stride": 16,
        "batch_size": 8,
        "max_tokens": None,
        "dtype": "float32",
        "device": "cpu",
        "bos": "none",
    }
    assert {"tokens", "sha256", "documents"} <= out["data"].keys()
    for model, path in zip(out["models"], pair, strict=True):
        wanted = {"path", "loss", "perplexity", "bits_per_byte", "tokens", "kv_bytes_per_token"}
        assert wanted <= model.keys() and model["path"] == str(path)
        assert model["perplexity"] == pytest.approx(math.exp(model["loss"]))
        assert model["bits_per_byte"] == pytest.approx(
            model["loss"] * model["tokens"] / math.log(2) / model["bytes"]
        )
        assert model["kv_bytes_per_token"] == 2 * 2 * 32 * 4
        assert sum(p["loss"] * p["tokens"] for p in model["positions"]) == pytest.approx(
            model["loss"] * model["tokens"]
        )
        assert model["confidence"]["low"] < model["loss"] < model["confidence"]["high"]


@torch.no_grad()
def test_agreement_equals_brute_force(
    compared: EvaluateResult, pair: tuple[Path, Path], plain: PreTrainedTokenizerBase, corpus: Path
) -> None:
    from mha2gqa.checkpoints.loading import load_model

    original, other = (load_model(p, device="cpu") for p in pair)
    divergences, same, first, second = [], [], [], []
    for line in corpus.read_text().splitlines():
        text = json.loads(line)["text"]
        for w in PROTOCOLS["window"](plain, [Document(text, "")], Settings(32, 16)):
            ids = torch.tensor(w.ids[None].astype(np.int64))
            p, q = (m(ids[:, :-1]).logits[0, w.first :].double().log_softmax(-1) for m in (original, other))
            divergences += (p.exp() * (p - q)).sum(-1).tolist()
            same += (p.argmax(-1) == q.argmax(-1)).tolist()
            target = ids[0, 1 + w.first :, None]
            first += (-p.gather(1, target)).flatten().tolist()
            second += (-q.gather(1, target)).flatten().tolist()
    a, b = compared.models
    assert (a.loss, b.loss) == (pytest.approx(np.mean(first)), pytest.approx(np.mean(second)))
    assert a.agreement is None and a.kl is None and b.agreement is not None
    assert b.kl == pytest.approx(np.mean(divergences), rel=1e-4)
    assert b.top1_agreement == pytest.approx(np.mean(same))
    assert b.paired is not None and b.paired.difference == pytest.approx(np.mean(second) - np.mean(first))
    errors = b.agreement.attention_error
    assert list(errors) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(0.001 < e < 2 for e in errors.values())


def test_against_changes_no_loss_and_joins_the_table(
    compared: EvaluateResult, pair: tuple[Path, Path], corpus: Path
) -> None:
    alone = evaluate(pair, corpus, window=32, device="cpu")
    joined = evaluate(pair[1], corpus, window=32, device="cpu", against=pair[0])
    for result in (alone, joined):
        for model, expected in zip(result.models, compared.models, strict=True):
            assert model.path == expected.path and model.sha256 == expected.sha256
            assert model.loss == pytest.approx(expected.loss, rel=1e-6)
    assert alone.models[1].agreement is None and alone.models[1].paired is not None


def test_worst_documents_are_named_with_their_place(compared: EvaluateResult, corpus: Path) -> None:
    worst = compared.models[1].worst
    losses = [w.loss - w.loss_against for w in worst]
    assert len(worst) == 10 and losses == sorted(losses, reverse=True)
    lines = corpus.read_text().splitlines()
    for w in worst:
        file, line = w.source.rsplit(":", 1)
        assert file == str(corpus)
        assert w.tokens == len(json.loads(lines[int(line) - 1])["text"].split()) - 1


def test_a_model_equals_itself(pair: tuple[Path, Path], corpus: Path) -> None:
    result = evaluate([pair[0], pair[0]], corpus, window=32, device="cpu")
    a, b = result.models
    assert a.loss == b.loss and b.paired is not None
    assert (b.paired.difference, b.paired.standard_error, b.paired.p_value) == (0, 0, 1)


@pytest.mark.parametrize("protocol", ["window", "blocks", "rolling"])
@pytest.mark.parametrize("limit", [16, 50, 77])
def test_max_tokens_is_exact(
    model: torch.nn.Module, plain: PreTrainedTokenizerBase, protocol: str, limit: int
) -> None:
    result = run(model, plain, documents([30, 30, 30]), protocol=protocol, window=16, max_tokens=limit)
    assert result.models[0].tokens == (limit // 16 * 16 if protocol == "blocks" else limit)
    assert result.data["documents"] == {16: 1, 50: 2, 77: 3}[limit]


def test_progress_is_told(model: torch.nn.Module, plain: PreTrainedTokenizerBase) -> None:
    seen = []
    run(model, plain, documents([30] * 8), window=8, batch_size=2, progress=lambda *a: seen.append(a))
    assert len(seen) > 3 and seen[-1] == ("m", 8 * 29)


# --- what cannot be compared, or not at all ------------------------------------------------------------


def test_other_tokenizers_are_compared_by_bytes_only(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<eos>": 0, "<unk>": 1} | {c: i + 2 for i, c in enumerate("w0123456789 ")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    by_letter = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    a, b = LoadedModel("a", pico_llama(), plain), LoadedModel("b", pico_llama(), by_letter)
    docs = documents([20, 30])
    result = evaluate([a, b], docs, window=16, device="cpu")
    assert result.comparison == "bits_per_byte" and any("tokenizers differ" in n for n in result.warnings)
    assert [m.loss for m in result.models] == [m.perplexity for m in result.models] == [None, None]
    assert all(m.bits_per_byte > 0 for m in result.models)
    assert result.models[1].bytes == sum(len(d.text) - 1 for d in docs)
    sizes = sorted(m.bytes for m in result.models)  # first tokens, one of which is a letter, have no context
    assert sizes[0] < sizes[1] and any(
        f"between {sizes[0]:,} and {sizes[1]:,} b" in n for n in result.warnings
    )
    with pytest.raises(UsageError, match="tokenizers differ"):
        evaluate([a, b], docs, window=16, device="cpu", against=a)
    with pytest.raises(UsageError, match="same text"):
        evaluate([a, b], docs, window=16, device="cpu", max_tokens=10)
    whole = evaluate([a, b], docs, protocol="rolling", device="cpu")
    assert not any("not quite" in n for n in whole.warnings)
    rolling = whole.models[1]
    assert rolling.paired is not None  # the same bytes, document by document


def test_infinite_loss_is_reported(plain: PreTrainedTokenizerBase) -> None:
    class Never(torch.nn.Module):
        def __init__(self, head: torch.nn.Module) -> None:
            super().__init__()
            self.head, self.weight = head, head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.head(x)
            logits[..., 40] = -math.inf
            return logits

    net = pico_llama()
    net.lm_head = Never(net.lm_head)
    result = run(net, plain, documents([60, 60]), window=32)
    out = result.models[0]
    assert out.loss == out.perplexity == out.bits_per_byte == math.inf and out.confidence is None
    assert any("inf" in n for n in result.warnings)
    assert json.dumps(result.to_dict(), allow_nan=False)
    with pytest.raises(GateError):
        both = [LoadedModel("a", pico_llama(), plain), LoadedModel("b", net, plain)]
        check_gates(evaluate(both, documents([60, 60]), window=32, device="cpu"), max_ppl_ratio=2)


@pytest.mark.parametrize("lengths", [[1], [1, 0, 1]])
def test_one_token_text(model: torch.nn.Module, plain: PreTrainedTokenizerBase, lengths: list[int]) -> None:
    with pytest.raises(DataError, match="at most one token"):
        run(model, plain, documents(lengths))
    with pytest.raises(DataError, match="one block needs 17"):
        run(model, plain, documents(lengths), protocol="blocks", window=16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "nonsense"}, "protocol: must be one of blocks, window"),
        ({"window": 129}, "longer than the context of m; use at most 128"),
        ({"window": 0}, "window: must be >= 1, not 0"),
        ({"window": 16, "stride": 17}, "between 1 and the window of 16"),
        ({"window": 16, "stride": 0}, "stride: must be >= 1, not 0"),
        ({"batch_size": 0}, "batch_size: must be >= 1, not 0"),
        ({"max_tokens": 0}, "max_tokens: must be >= 1, not 0"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"dtype": "fp99"}, "fp99"),
    ],
)
def test_options_that_cannot_be_met(
    model: torch.nn.Module, plain: PreTrainedTokenizerBase, options: dict, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        run(model, plain, documents([20]), **options)


def test_defaults_bend_to_the_context_and_say_so(
    model: torch.nn.Module, plain: PreTrainedTokenizerBase
) -> None:
    result = run(model, plain, documents([200]))
    assert result.settings["window"] == 128 and result.settings["stride"] == 64
    assert result.warnings == ["window 128, the context of m"]
    result = run(model, plain, documents([200]), protocol="rolling", stride=3)
    assert result.settings["window"] == 128 and "ignored" in result.warnings[1]


def test_encoder_decoders_need_their_own_protocol(plain: PreTrainedTokenizerBase) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    with pytest.raises(UsageError, match="protocol rolling does not fit an encoder-decoder"):
        run(T5ForConditionalGeneration(config), plain, documents([20]), protocol="rolling")


def test_documents_are_read_as_they_are_needed(
    model: torch.nn.Module, plain: PreTrainedTokenizerBase
) -> None:
    """Memory does not grow with the corpus: the first batch waits for a bounded part of it."""
    drawn = 0

    def endless() -> Iterator[Document]:
        nonlocal drawn
        while True:
            drawn += 1
            yield Document(text_of(40), f"d:{drawn}")

    for protocol in ("window", "blocks", "rolling"):
        drawn = 0
        windows = PROTOCOLS[protocol](plain, endless(), Settings(16, 8))
        next(batching.make_batches(windows, 2, 16))
        assert drawn <= 1024


def test_a_tokenizer_that_is_too_large(plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CheckpointError, match="the model has 32 embeddings"):
        run(pico_llama(vocab_size=32), plain, documents([40]))


def test_tasks_need_lm_eval(
    model: torch.nn.Module, plain: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"pip install 'mha2gqa\[tasks\]'"):
        run(model, plain, documents([20]), tasks=["hellaswag"])


# --- statistics ----------------------------------------------------------------------------------------


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        tokens = rng.integers(20, 200, 60).astype(float)
        nll = tokens * (3 + 0.3 * rng.standard_normal(60))
        interval = bootstrap(nll, tokens, seed=trial)
        assert interval is not None
        covered += interval.low <= 3 <= interval.high
    assert 0.86 <= covered / 100 <= 0.99


def test_many_units_are_clustered_without_changing_the_width() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 200, 30_000).astype(float)
    nll = tokens * (3 + 0.3 * rng.standard_normal(30_000))
    interval = bootstrap(nll, tokens)
    loss = nll.sum() / tokens.sum()
    exact = np.sqrt(np.square(nll - loss * tokens).sum()) / tokens.sum()
    assert interval is not None
    assert (interval.high - interval.low) / (2 * 1.96 * exact) == pytest.approx(1, abs=0.1)


def test_pairing_sees_what_intervals_do_not() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(50, 100, 200).astype(float)
    first = tokens * (3 + 0.5 * rng.standard_normal(200))
    second = first + tokens * (0.02 + 0.02 * rng.standard_normal(200))
    test = paired_test(second, first, tokens, against="a")
    assert test is not None and test.low < 0.02 < test.high and test.p_value < 0.01
    assert test.difference == pytest.approx(0.02, abs=3 * test.standard_error)
    a, b = bootstrap(first, tokens), bootstrap(second, tokens)
    assert a is not None and b is not None and a.high > b.low  # unpaired: they overlap
    nothing = paired_test(first + tokens * 0.02 * rng.standard_normal(200), first, tokens, against="a")
    assert nothing is not None and nothing.p_value > 0.05


def test_too_little_for_statistics() -> None:
    one = np.ones(1)
    assert bootstrap(one, one) is None and paired_test(one, one, one, against="a") is None
    inf = np.array([1, math.inf])
    assert (
        bootstrap(inf, np.ones(2)) is None and paired_test(inf, np.ones(2), np.ones(2), against="a") is None
    )


# --- gates ---------------------------------------------------------------------------------------------


def test_gates(compared: EvaluateResult, pair: tuple[Path, Path]) -> None:
    a, b = compared.models
    assert a.loss is not None and b.loss is not None and b.top1_agreement is not None
    ratio = math.exp(b.loss - a.loss)
    check_gates(compared, max_ppl_ratio=ratio * 1.001, min_agreement=b.top1_agreement)
    check_gates(compared)
    with pytest.raises(GateError, match="max_ppl_ratio") as caught:
        check_gates(compared, max_ppl_ratio=ratio * 0.999)
    assert caught.value.exit_code == 3 and str(pair[1]) in str(caught.value)
    with pytest.raises(GateError, match="min_agreement"):
        check_gates(compared, min_agreement=b.top1_agreement + 0.001)


def test_gates_that_cannot_be_judged(pair: tuple[Path, Path], corpus: Path) -> None:
    result = evaluate(pair, corpus, window=32, device="cpu")
    with pytest.raises(UsageError, match="--against"):
        check_gates(result, min_agreement=0.5)
    result.models.pop()
    with pytest.raises(UsageError, match="two models"):
        check_gates(result, max_ppl_ratio=2)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_ppl_ratio": math.nan}, "--max-ppl-ratio nan"),
        ({"max_ppl_ratio": -1.0}, "--max-ppl-ratio -1"),
        ({"max_ppl_ratio": math.inf}, "--max-ppl-ratio inf"),
        ({"min_agreement": 98.0}, "--min-agreement 98"),
        ({"min_agreement": math.nan}, "--min-agreement nan"),
    ],
)
def test_limits_that_mean_nothing(compared: EvaluateResult, limits: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_gates(compared, **limits)
    with pytest.raises(UsageError, match=said):
        check_limits(2, True, **limits)


def test_against_comes_first_wherever_it_is_named(pair: tuple[Path, Path], corpus: Path) -> None:
    """Else a gate would hold the original against the converted model."""
    first, second = map(str, pair)
    for models in ([second, first], [second, f"{first}/"], [second], second):
        config = EvaluateConfig(models, corpus, against=first)
        assert [s.rstrip("/") for s in config.subjects] == [first, second]
    result = evaluate([second, first], corpus, against=first, window=32, device="cpu")
    assert [m.path for m in result.models] == [first, second]
    assert result.models[0].top1_agreement is None
    check_gates(result, min_agreement=result.models[1].top1_agreement)


def test_a_pipe_is_refused_where_the_text_is_read_twice(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="only once"):
        evaluate(pair, pipe, window=32, device="cpu")


def test_gate_over_other_tokens_goes_by_bytes() -> None:
    original = {"loss": None, "bits_per_byte": 1.0, "tokens": 100, "bytes": 400}
    other = {"loss": None, "bits_per_byte": 1.1, "tokens": 90, "bytes": 400}
    assert perplexity_ratio(other, original) == pytest.approx(math.exp(0.1 * math.log(2) * 4))
