"""Calibrated merging for keys without RoPE: full linear symmetry, biases, tied head orders, cross-attention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_proofs import key_matrix
from families import PICOS, H, assert_same, inputs, logits, stock_model
from test_modeling_oracles import shared_states
from test_seq2seq import WINDOW, saved_t5
from torch import Tensor

from mha2gqa.architectures import find_attention_modules, find_spec, geometry, rotary_dim
from mha2gqa.calibration import collect
from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.conversion import calibration_inputs
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.errors import DataError, UsageError
from mha2gqa.heads import AttentionWeights, permute_queries, query_order, split, unsplit
from mha2gqa.reconstruct import ReconstructConfig

GROUPS = {"self": 2, "cross": 2}
FAMILIES = [
    "t5",
    "umt5",
    "bart",
    "whisper",
    "moonshine",
    "moonshine_streaming",
    "musicgen",
    "musicgen_melody",
    "gpt2",
    "opt",
    "gpt_neo",
    "biogpt",
    "bloom",
    "mpt",
]


def symmetric_copies(
    w: AttentionWeights, generator: torch.Generator, keys: Tensor | None = None
) -> AttentionWeights:
    """The same function with every head in a basis of its own: nothing looks alike any more.

    `keys` `[H, d, d]` is what keys are changed by, where positions do not allow any basis.
    """
    d, e = w.k.shape[1], w.v.shape[1]

    def basis(n: int) -> Tensor:
        return torch.linalg.qr(torch.randn(H, n, n, generator=generator, dtype=torch.float64))[0] * (
            0.5 + torch.rand(H, 1, n, generator=generator, dtype=torch.float64)
        )

    a, r = basis(d) if keys is None else keys.double(), basis(e)
    inverse = torch.linalg.inv(a).mT

    def turn(m: Tensor, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        y = x.double()[..., None] if x.dim() == 2 else x.double()
        return (m @ y).reshape(x.shape).to(x.dtype)

    q, k, v = turn(inverse, w.q), turn(a, w.k), turn(r, w.v)
    assert q is not None and k is not None and v is not None
    o = (w.o.double() @ torch.linalg.inv(r)).to(w.o.dtype)
    biases = (turn(inverse, w.q_bias), turn(a, w.k_bias), turn(r, w.v_bias))
    return AttentionWeights(q, k, v, o, *biases, w.o_bias, w.kv_extras, w.query_extras)


def shuffled(state: dict[str, Tensor], name: str, order: list[int]) -> dict[str, Tensor]:
    """Every attention module under symmetric copies, its heads in another order where that is allowed."""
    config = {"model_type": PICOS[name][0], **PICOS[name][1]}
    spec, out = find_spec(config), dict(state)
    generator = torch.Generator().manual_seed(3)
    for module in find_attention_modules(spec, state):
        shapes = {n: tuple(x.shape) for n, x in state.items()}
        shape = geometry(spec, config, module, shapes)
        weights = split(spec, shape, {role: state[n] for role, n in module.names.items()})
        rotary = rotary_dim(spec, config, shape.head_dim)
        keys = key_matrix(spec, H, shape.head_dim, rotary) if rotary else None
        weights = symmetric_copies(weights, generator, keys)
        if spec.permutable != "never":
            index = torch.tensor(order)
            moved = permute_queries(weights, order)
            kv = {n: None if (x := getattr(weights, n)) is None else x[index] for n in ("k_bias", "v_bias")}
            weights = AttentionWeights(
                moved.q, weights.k[index], weights.v[index], moved.o, moved.q_bias, kv["k_bias"], kv["v_bias"],
                moved.o_bias, moved.kv_extras, moved.query_extras,
            )  # fmt: skip
        out |= {module.names[role]: x for role, x in unsplit(spec, weights).items()}
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_symmetric_copies_in_any_order_merge_without_loss(name: str, tmp_path: Path) -> None:
    stock = stock_model(name)
    _, repeated = shared_states(name, stock.state_dict(), GROUPS)
    stock.load_state_dict(repeated)
    right = logits(stock, inputs(name))
    stock.load_state_dict(shuffled(repeated, name, [0, 4, 5, 1, 2, 6, 3, 7]))
    assert_same(logits(stock, inputs(name)), right)
    stock.save_pretrained(tmp_path / "in")
    result = convert(tmp_path / "in", tmp_path / "out", 2, method="joint")
    merged = load_model(tmp_path / "out", device="cpu")
    torch.testing.assert_close(logits(merged, inputs(name)), right, rtol=2e-3, atol=2e-3)
    assert max(layer["residual"] for layer in result.layers) < 1e-6
    pooled = convert_model(stock, 2, method="mean")  # the mean of copies in other bases is something else
    assert (logits(pooled, inputs(name)) - right).abs().mean() > 0.1 * right.std()
    if name == "t5":
        own = {str(layer["grouping"]) for layer in result.layers if layer["kind"] == "self"}
        assert len(own) == 1  # one order of heads for the shared position bias


def test_groupings_that_would_change_the_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "grouping.json"
    swapped = [[0, 2, 4, 6], [1, 3, 5, 7]]
    for name in ("bloom", "t5", "umt5"):
        stock_model(name).save_pretrained(tmp_path / name)
    file.write_text(json.dumps(swapped))
    with pytest.raises(UsageError, match="cannot be reordered"):
        convert(tmp_path / "bloom", tmp_path / "out", 2, grouping=str(file))
    convert(tmp_path / "t5", tmp_path / "t5-out", 2, grouping=str(file))  # all layers alike
    expected = convert_model(stock_model("t5"), 2, groupings=dict.fromkeys(t5_paths(), swapped))
    found = load_model(tmp_path / "t5-out", device="cpu")
    assert_same(logits(found, inputs("t5")), logits(expected, inputs("t5")))
    neighbours = [[0, 1, 2, 3], [4, 5, 6, 7]]
    file.write_text(json.dumps({"0": swapped, "1": neighbours}))
    with pytest.raises(UsageError, match="all layers share one position bias"):
        convert(tmp_path / "t5", tmp_path / "out", 2, grouping=str(file))
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "umt5", tmp_path / "out", 2, grouping=str(file))  # a bias per layer


def t5_paths() -> list[str]:
    return [
        module.path
        for module in find_attention_modules(find_spec({"model_type": "t5"}), stock_model("t5").state_dict())
    ]


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_heads_may_be_reordered_as_the_table_says(name: str) -> None:
    """Moving heads without sharing them changes nothing: all layers alike for T5, each its own for umT5."""
    stock = stock_model(name)
    config = {"model_type": name, **PICOS[name][1]}
    spec, state, moved = find_spec(config), stock.state_dict(), dict(stock.state_dict())
    orders = [[3, 1, 0, 2, 7, 6, 5, 4], [6, 7, 5, 4, 0, 1, 2, 3]]
    for module in find_attention_modules(spec, state):
        order = orders[0 if spec.permutable_of(module.kind) == "model" else module.layer]
        shape = geometry(spec, config, module, {n: tuple(x.shape) for n, x in state.items()})
        weights = split(spec, shape, {role: state[n] for role, n in module.names.items()})
        queries = permute_queries(weights, query_order([[h] for h in order], 1))
        both = AttentionWeights(
            queries.q, weights.k[order], weights.v[order], queries.o, query_extras=queries.query_extras
        )
        moved |= {module.names[role]: x for role, x in unsplit(spec, both).items()}
    right = logits(stock, inputs(name))
    stock.load_state_dict(moved)
    assert_same(logits(stock, inputs(name)), right)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    rows = [" ".join(f"w{w}" for w in np.random.default_rng(i).integers(0, 40, 60)) for i in range(200)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def test_cross_attention_is_calibrated_on_what_the_encoder_says(tmp_path: Path, text: str) -> None:
    """Moments of keys and values are those of encoder states, the averages those of its own weights."""
    from mha2gqa.conversion import CalibrationOptions

    folder = saved_t5(tmp_path / "t5")
    options = CalibrationOptions((text,), tokens=40 * WINDOW, window=WINDOW)
    rows = read_rows(folder, options)
    assert set(rows) == {"input_ids", "decoder_input_ids", "labels"}
    batch = {n: x[:6] for n, x in rows.items() if n != "labels"}
    model = load_model(folder, device="cpu", attn_implementation="eager")
    statistics = collect(model, find_spec(model.config.to_dict()), batch, batch_size=4)
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    x = out.encoder_last_hidden_state.double()
    x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
    attention = out.cross_attentions[1].double()
    weight = (1 + attention.mean((1, 2)) * x.shape[1]) / 2  # half of it by the attention received
    inputs_moment = torch.einsum("bs,bsi,bsj->ij", weight, x, x) / (x.shape[0] * x.shape[1])
    mixed = torch.einsum("bhts,bsi->bhti", attention, x).flatten(0, 2)
    module = statistics.modules["cross.1"]
    assert module.cross and not statistics.modules["self.1"].cross
    torch.testing.assert_close(module.inputs, inputs_moment, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.mixed, mixed.T @ mixed / len(mixed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_calibrated_conversion_beats_pooling_at_every_stage(name: str, tmp_path: Path, text: str) -> None:
    from mha2gqa.reconstruct import ReconstructConfig

    folder = saved_t5(tmp_path / "in", name=name)
    fit = ReconstructConfig(steps=40, batch_size=8, check_every=20)
    options: dict[str, Any] = {
        "calibration": [text], "calibration_tokens": 200 * WINDOW, "calibration_window": WINDOW, "fit": fit,
        "device": "cpu",
    }  # fmt: skip
    result = convert(folder, tmp_path / "joint", 2, **options)
    assert result.method == "joint" and {layer["kind"] for layer in result.layers} == {"self", "cross"}
    losses = result.calibration["losses"]
    assert all(np.isfinite(list(losses.values())))
    pooled = convert(folder, tmp_path / "mean", 2, method="mean", refit=False, reconstruct=False, **options)
    original, joint, mean = (load_model(tmp_path / f, device="cpu") for f in ("in", "joint", "mean"))
    rows = read_rows(folder, calibration_options(text))
    batch = {n: x[:32] for n, x in rows.items() if n != "labels"}
    right = logits(original, batch)
    errors = [float((logits(model, batch) - right).square().mean()) for model in (joint, mean)]
    assert errors[0] < 0.5 * errors[1], errors
    assert pooled.calibration["losses"]["merged"] == pytest.approx(
        pooled.calibration["losses"].get("fitted", pooled.calibration["losses"]["merged"])
    )
    for layer in result.layers:
        assert layer["error_fitted"] <= 1.01 * layer["error_merged"]


def read_rows(folder: Path, options: Any) -> dict[str, Tensor]:
    inputs = calibration_inputs(load_tokenizer(folder), open_checkpoint(folder).config, options)
    return dict(inputs.rows)


def calibration_options(text: str) -> Any:
    from mha2gqa.conversion import CalibrationOptions

    return CalibrationOptions((text,), tokens=100 * WINDOW, window=WINDOW)


def test_plain_text_cannot_calibrate_models_without_sentinels(tmp_path: Path, text: str) -> None:
    from conftest import word_tokenizer

    stock_model("bart").save_pretrained(tmp_path / "bart")
    word_tokenizer(tmp_path / "bart")
    with pytest.raises(DataError, match="needs the columns source and target"):
        convert(tmp_path / "bart", tmp_path / "out", 2, calibration=[text], device="cpu")


def test_an_exported_model_can_be_calibrated_again(tmp_path: Path, text: str) -> None:
    folder = saved_t5(tmp_path / "in")
    convert(folder, tmp_path / "four", 4)
    result = convert(
        tmp_path / "four",
        tmp_path / "two",
        2,
        calibration=[text],
        calibration_tokens=100 * WINDOW,
        calibration_window=WINDOW,
        refit=False,
        reconstruct=False,
        device="cpu",
    )
    assert result.num_kv_heads == {"before": 4, "after": 2}
    assert all(np.isfinite(list(result.calibration["losses"].values())))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_only_the_attention_that_is_shared_is_fitted(kind: str, tmp_path: Path, text: str) -> None:
    """What is written is what was fitted and judged; attention of the other kind keeps its bytes."""
    from mha2gqa.conversion import CalibrationOptions

    folder = saved_t5(tmp_path / "t5")
    fit = ReconstructConfig(steps=4, batch_size=4, check_every=2, holdout=0.2, distill_steps=2)
    words: dict[str, Any] = {"attention": (kind,), "fit": fit}
    size = {"calibration_tokens": 40 * WINDOW, "calibration_window": WINDOW}
    done = convert(folder, tmp_path / "out", 2, calibration=[text], device="cpu", **size, **words)
    assert {layer["kind"] for layer in done.layers} == {kind}
    assert all("error_fitted" in layer for layer in done.layers)
    rows = read_rows(folder, CalibrationOptions((text,), tokens=40 * WINDOW, window=WINDOW))
    source = load_model(folder, device="cpu")
    made = convert_model(source, 2, calibration=rows, **words).state_dict()
    written, original = load_model(tmp_path / "out", device="cpu").state_dict(), source.state_dict()
    for name, x in written.items():
        assert torch.equal(x, made[name]), name
        shared = {"self": "decoder.*SelfAttention", "cross": "EncDecAttention"}[kind]
        if not re.search(shared, name):
            assert torch.equal(x, original[name]), name
