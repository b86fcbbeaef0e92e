"""Models in memory in pipelines: what the Python functions keep of them, and what they refuse in one line."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import pico_llama, word_tokenizer
from families import stock_model
from torch import nn

import mha2gqa
from mha2gqa import AttentionSpec, LoadedModel, convert_model, convert_state_dict, evaluate, train_model
from mha2gqa.config import ConvertConfig
from mha2gqa.config.option import taken
from mha2gqa.conversion.warnings import loss_warnings
from mha2gqa.errors import UsageError

IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
BLOCKS = torch.randint(3, 60, (48, 17), generator=torch.Generator().manual_seed(3))
FEW = {"steps": 4, "batch_size": 8}
TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20"] * 4


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def calibrated(model: Any, **options: Any) -> Any:
    return convert_model(model, 4, calibration=BLOCKS, fit=FEW, **options)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, BLOCKS])
def test_parameters_ask_for_gradients_as_those_of_the_original_do(data: torch.Tensor | None) -> None:
    model = pico_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    new = convert_model(model, 4, calibration=data, fit=FEW if data is not None else None)
    for one in (model, new):
        assert [n for n, p in one.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]


def test_a_calibrated_model_can_be_trained() -> None:
    model = pico_llama()
    new = calibrated(model)
    before = new.lm_head.weight.detach().clone()
    train_model(new, BLOCKS, teacher=model, tokens=512, batch_tokens=256, device="cpu")
    assert not torch.equal(new.lm_head.weight, before)


def test_what_surrounds_a_conversion_does_not_change_it() -> None:
    model, right = pico_llama(), logits(calibrated(pico_llama()))
    with torch.autocast("cpu", torch.bfloat16):
        inside = calibrated(model)
    assert torch.equal(logits(inside), right)
    with torch.inference_mode():
        inside = calibrated(model)
    assert torch.equal(logits(inside), right)
    with ThreadPoolExecutor(2) as threads:
        for made in threads.map(calibrated, [pico_llama(), pico_llama()]):
            assert torch.equal(logits(made), right)


@pytest.mark.parametrize("kind", ["int32", "numpy"])
def test_blocks_may_be_of_any_integer_type(kind: str) -> None:
    blocks = BLOCKS.int() if kind == "int32" else BLOCKS.numpy()
    assert torch.equal(
        logits(convert_model(pico_llama(), 4, calibration=blocks, fit=FEW)), logits(calibrated(pico_llama()))
    )


@pytest.mark.parametrize("method", ["mean", "joint"])
def test_models_in_float64_keep_it(method: str) -> None:
    model = pico_llama().double()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.weight.view(4, 2, 4, -1)[:, 1] = part.weight.view(4, 2, 4, -1)[:, 0]
    new = convert_model(model, 4, method=method, grouping="neighbours")
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    assert float((logits(new) - logits(model)).abs().max()) < 1e-11


@pytest.mark.parametrize("more", [{}, {"train": "layer"}, {"distill_steps": 2}])
def test_models_in_float64_are_fitted_in_it(more: dict[str, Any]) -> None:
    made = [
        convert_model(pico_llama().to(dtype), 4, calibration=BLOCKS, fit=FEW | more)
        for dtype in (torch.float64, torch.float32)
    ]
    assert {p.dtype for p in made[0].parameters()} == {torch.float64}
    torch.testing.assert_close(logits(made[0]).float(), logits(made[1]), rtol=1e-3, atol=1e-3)


def test_one_kind_of_attention_may_stand_alone() -> None:
    assert taken(ConvertConfig, {"attention": "self", "wide": "2"}) == {"attention": ("self",), "wide": 2}
    assert torch.equal(
        logits(convert_model(pico_llama(), 4, attention="self")), logits(convert_model(pico_llama(), 4))
    )


# --- what is refused -------------------------------------------------------------------------------------


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(pico_llama().config)


def with_value_head() -> Any:
    model = pico_llama()
    model.v_head = nn.Linear(32, 1)
    return model


def untied() -> Any:
    model = pico_llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def with_adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(pico_llama(), LoraConfig(target_modules=["up_proj"], r=2)).base_model.model


def cut() -> Any:
    model = pico_llama()
    model.model.layers = model.model.layers[:1]
    return model


def offloaded(folder: Path) -> Any:
    """A model whose second layer lies on disk, as `device_map="auto"` leaves it."""
    pico_llama().save_pretrained(folder / "saved")
    places: dict[str, Any] = dict.fromkeys(
        ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    return transformers.LlamaForCausalLM.from_pretrained(
        folder / "saved", device_map=places, offload_folder=folder / "offloaded"
    )


def made_of_more() -> Any:
    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, extra: int) -> None:
            super().__init__(config)

    return Own(pico_llama().config, 3)


def in_inference_mode() -> Any:
    with torch.inference_mode():
        return pico_llama()


def quantised() -> Any:
    model = pico_llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


@pytest.mark.parametrize("data", [None, BLOCKS])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (on_meta, "is on the meta device, where no numbers are"),
        (with_value_head, "its class has no place for v_head.bias, v_head.weight"),
        (untied, "lm_head.weight is not model.embed_tokens.weight, which its config ties it to"),
        (with_adapter, "adapters of PEFT are in it ('model.layers.0.mlp.up_proj.base_layer.weight')"),
        (cut, "its config asks for model.layers.1.input_layernorm.weight, "),
        (made_of_more, "a Own is not made of a config alone (extra)"),
        (in_inference_mode, "was made in torch.inference_mode()"),
        (quantised, "quantised checkpoint (bitsandbytes)"),
        (lambda: nn.DataParallel(pico_llama()), "give model.module, which it wraps"),
    ],
)
def test_a_model_that_cannot_be_copied_is_refused(
    make: Callable[[], Any], what: str, data: torch.Tensor | None
) -> None:
    model = make()
    assert what in refused(lambda: convert_model(model, 4, calibration=data))


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        (BLOCKS.float(), "must be token ids [N, T + 1], not float32 [48, 17]"),
        (BLOCKS[0], "must be token ids [N, T + 1]"),
        (BLOCKS.tolist(), "must be token ids [N, T + 1]"),
        ("text.jsonl", "must be token ids [N, T + 1], not 'text.jsonl'"),
        (BLOCKS[:0], "[0, 17] are no rows of at least two ids"),
        (BLOCKS[:, :1], "[48, 1] are no rows of at least two ids"),
        (BLOCKS + 40, "the model has 64 embeddings"),
        (BLOCKS - 100, "the model has 64 embeddings"),
    ],
)
def test_what_is_no_token_block_is_refused(blocks: Any, what: str) -> None:
    for call in (
        lambda: convert_model(pico_llama(), 4, calibration=blocks),
        lambda: train_model(pico_llama(), blocks, tokens=512, batch_tokens=256),
        lambda: train_model(pico_llama(), BLOCKS, held_out=blocks, tokens=512, batch_tokens=256),
    ):
        assert what in refused(call)


def test_rows_of_an_encoder_decoder_are_checked() -> None:
    rows = {"input_ids": BLOCKS, "decoder_input_ids": BLOCKS[:, :8], "labels": BLOCKS[:, 1:9]}
    model = stock_model("t5")
    short = rows | {"labels": rows["labels"][:5]}
    for given, what in (
        (BLOCKS, "must be keyword tensors of an encoder-decoder"),
        ({"input_ids": BLOCKS, "labels": BLOCKS}, "calibration: lacks decoder_input_ids"),
        (short, "has tensors of different lengths (input_ids 48, decoder_input_ids 48, labels 5)"),
        (rows | {"input_ids": BLOCKS + 40}, "calibration['input_ids']: holds id 99"),
    ):
        assert what in refused(lambda given=given: convert_model(model, 2, calibration=given))
    speech = stock_model("whisper")
    assert "lacks input_features" in refused(lambda: convert_model(speech, 2, calibration=rows))


def test_a_model_without_an_output_head_is_refused_where_logits_are_needed(tmp_path: Path) -> None:
    config = pico_llama().config
    config.pad_token_id = 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_tokenizer(tmp_path))
    for model in (pico_llama().model, transformers.LlamaForSequenceClassification(config)):
        assert convert_model(model, 4).config.num_key_value_heads == 4
        for call in (
            lambda model=model: calibrated(model),
            lambda model=model: train_model(model, BLOCKS, tokens=512, batch_tokens=256),
            lambda model=model: evaluate(LoadedModel("m", model, tokenizer), TEXTS, device="cpu"),
        ):
            assert f"a {type(model).__name__} gives no logits of tokens" in refused(call)
    with_code = stock_model("bart").model  # whose result is of one class, with its head
    assert "a BartModel gives no logits" in refused(lambda: convert_model(with_code, 2))


def test_blocks_longer_than_a_table_of_positions_are_refused() -> None:
    longer = torch.randint(3, 60, (8, 70))
    budget = {"tokens": 64, "batch_tokens": 64, "device": "cpu"}
    for name in ("gpt2", "opt", "biogpt", "gpt_neo"):
        for call in (
            lambda model: convert_model(model, 1, calibration=longer, fit={"steps": 1}),
            lambda model: train_model(model, longer, **budget),
        ):
            said = refused(lambda call=call, name=name: call(stock_model(name)))
            assert "has rows of 69 tokens, the model has 64 positions; cut shorter blocks" in said
        assert convert_model(stock_model(name), 1, calibration=longer[:, :65], fit={"steps": 1})
    assert convert_model(pico_llama(), 4, calibration=torch.randint(3, 60, (8, 150)), fit={"steps": 1})


def test_models_that_cannot_be_trained_or_scored_are_refused(tmp_path: Path) -> None:
    frozen = pico_llama().requires_grad_(False)
    budget = {"tokens": 512, "batch_tokens": 256}
    assert "no parameter asks for a gradient" in refused(lambda: train_model(frozen, BLOCKS, **budget))
    assert "meta device" in refused(lambda: train_model(on_meta(), BLOCKS, **budget))
    text: Any = "original"
    assert "teacher: must be a model" in refused(
        lambda: train_model(pico_llama(), BLOCKS, teacher=text, **budget)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_tokenizer(tmp_path))
    assert "meta device" in refused(lambda: evaluate(LoadedModel("m", on_meta(), tokenizer), TEXTS))
    part = offloaded(tmp_path)  # accelerate brings the layer for a forward pass, and for nothing else
    assert "layers.1.self_attn.q_proj.weight is on the meta" in refused(lambda: convert_model(part, 4))
    assert "layers.1.self_attn.q_proj.weight is on the meta" in refused(
        lambda: train_model(part, BLOCKS, **budget)
    )
    found = evaluate(
        [LoadedModel(n, m, tokenizer) for n, m in (("a", part), ("b", pico_llama()))], TEXTS
    ).models
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-6)
    swapped: Any = LoadedModel(pico_llama(), tokenizer, None)  # type: ignore[arg-type]
    assert "must be a model of transformers" in refused(lambda: evaluate(swapped, TEXTS))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"wide": 0}, "wide: must be >= 1, not 0"),
        ({"seed": "x"}, "seed: must be a whole number"),
        ({"method": "best"}, "method: must be one of"),
        ({"grouping": "search", "groupings": {}}, "grouping: decides what groupings gives, too"),
        ({"statistics": "absent.statistics"}, "No such file or directory"),
    ],
)
def test_options_are_read_as_convert_reads_them(options: dict[str, Any], what: str) -> None:
    assert what in refused(lambda: convert_model(pico_llama(), 4, **options))


PATHS = [f"model.layers.{n}.self_attn" for n in range(2)]
PAIRED = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "groupings",
    [
        [PAIRED, PAIRED],
        "search",
        dict.fromkeys(PATHS),
        {path: [[0.0, 1.0], *PAIRED[1:]] for path in PATHS},
        {PATHS[0]: [PAIRED]},
    ],
)
def test_groupings_of_another_kind_are_refused(groupings: Any) -> None:
    message = refused(lambda: convert_model(pico_llama(), 4, groupings=groupings))
    assert message.startswith("grouping: holds no lists of head numbers for model.layers.0.self_attn")
    assert "such as [[0, 1], [2, 3], [4, 5], [6, 7]]" in message


def test_state_dicts_that_cannot_be_converted_are_refused() -> None:
    spec, state = AttentionSpec(), pico_llama().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    for given, words, what in (
        ({n: x.numpy() for n, x in state.items()}, {}, "is not a tensor of torch but"),
        ({"model": state}, {}, "state_dict: model is not a tensor of torch but"),
        (pico_llama(), {}, "must be a mapping of names to tensors"),
        ({n: x.to("meta") for n, x in state.items()}, {}, "is on the meta device"),
        (state | {name: state[name].to(torch.int8)}, {}, f"{name} is of torch.int8, quantised"),
        (state, {"spec": "llama"}, "must be an AttentionSpec, not 'llama'"),
        (state, {"method": "best"}, "method: must be one of"),
        (state, {"seed": "x"}, "seed: must be a whole number"),
        (state, {"groupings": {}}, "grouping: no entry for model.layers.0.self_attn"),
    ):
        options: dict[str, Any] = {"spec": spec, "groups": 4, "num_heads": 8} | words
        assert what in refused(lambda given=given, options=options: convert_state_dict(given, **options))


# --- what is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [True, False])
def test_statistics_of_other_weights_behind_the_same_attention_are_told(
    in_memory: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, file = pico_llama(), str(tmp_path / "moments")
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(-3)
    for name, model in (("first", pico_llama()), ("other", other)):
        model.save_pretrained(tmp_path / name)
        word_tokenizer(tmp_path / name)
    told, count = "measured on other weights with the same attention", 0

    def warned(name: str, **options: Any) -> bool:
        nonlocal count
        count += 1
        if not in_memory:
            texts: Any = (
                [row.numpy() for row in BLOCKS] if options.pop("calibration", None) is not None else ()
            )
            words: dict[str, Any] = {"calibration_window": 16, "device": "cpu", "statistics": file} | options
            out = tmp_path / f"out{count}"
            return told in str(mha2gqa.convert(tmp_path / name, out, 4, calibration=texts, **words).warnings)
        caplog.clear()
        convert_model(pico_llama() if name == "first" else other, 4, statistics=file, **options)
        return told in caplog.text

    with_text: dict[str, Any] = {"calibration": BLOCKS, "fit": FEW}
    assert not warned("first", **with_text)  # measures
    assert not warned("first") and not warned("first", **with_text)
    assert warned("other") and warned("other", **with_text)


def test_what_was_asked_and_is_left_alone_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    convert_model(pico_llama(), 4, effort="quick")
    assert "no module is fitted" in caplog.text
    caplog.clear()
    convert_model(pico_llama(), 4, calibration=BLOCKS[:2])
    assert "too few to fit modules" in caplog.text
    caplog.clear()
    convert_model(pico_llama(), 4, method="mean", statistics=str(tmp_path / "absent"))
    assert "method mean uses no statistics" in caplog.text
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_tokenizer(tmp_path))
    model = LoadedModel("m", pico_llama().bfloat16(), tokenizer)
    options: Any = {"protocol": "blocks", "window": 8, "device": "cpu"}
    told = evaluate(model, TEXTS, dtype="float32", **options).warnings
    assert "m is in memory and stays torch.bfloat16: --dtype has no effect" in told
    assert not [w for w in evaluate(model, TEXTS, **options).warnings if "no effect" in w]


def test_a_conversion_that_loses_nothing_is_not_warned_of(
    pico: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = mha2gqa.convert(pico, tmp_path / "whole", 8, wide=2)  # each wide head holds two whole ones
    assert not [w for w in whole.warnings if "without calibration data" in w]
    half = mha2gqa.convert(pico, tmp_path / "half", 4, wide=2)
    assert [w for w in half.warnings if "without calibration data" in w]
    assert loss_warnings({"original": 3.0, "merged": 3.0002, "fitted": 3.0002}, 32000) == []
    assert "fitting did not lower" in loss_warnings({"original": 3.0, "merged": 3.1, "fitted": 3.1}, 32000)[0]
    assert "gqa4-wide2 --groups 4 --wide 2" in mha2gqa.plan(pico, groups=4, wide=2).recommended
    assert "1 KV head of head_dim 8 holds the cache" in str(mha2gqa.plan(pico, groups=2, wide=2).warnings)


def test_data_in_memory_is_read_where_it_can_be_and_refused_elsewhere(pico: Path, tmp_path: Path) -> None:
    word_tokenizer(pico)
    rows = [row.numpy() for row in BLOCKS]
    words: dict[str, Any] = {"calibration_window": 16, "fit": FEW, "device": "cpu"}
    made = mha2gqa.convert(pico, tmp_path / "out", 4, calibration=rows, **words)
    assert made.calibration["texts"] == ["(in memory)"]
    for data in (TEXTS, iter(TEXTS), rows):
        given: Any = data
        message = refused(lambda given=given: mha2gqa.uptrain(pico, tmp_path / "up", given, tokens=512))
        assert message.startswith("data: must be names of files or data sets") and "train_model" in message


# --- training that goes on -------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_belongs_to_one_run(tmp_path: Path) -> None:
    words: dict[str, Any] = {"tokens": 1024, "batch_tokens": 256, "save_steps": 2, "device": "cpu"}

    def trained(
        model: Any = None, blocks: torch.Tensor = BLOCKS, **more: Any
    ) -> tuple[torch.Tensor, int | None]:
        model = model or pico_llama()
        result = train_model(model, blocks, folder=tmp_path / "run", **(words | more))
        assert not model.training  # as it was given
        return model.lm_head.weight.detach().clone(), result.resumed_from

    first, began = trained()
    again, resumed = trained()
    assert (began, resumed) == (None, 4) and torch.equal(first, again)
    other = pico_llama()
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    for call, what in (
        (lambda: trained(other), "model contents: "),
        (lambda: trained(blocks=BLOCKS.flip(0)), "blocks: "),
        (lambda: trained(learning_rate=1e-5), "learning_rate: None -> 1e-05"),
        (lambda: trained(teacher=pico_llama()), "teacher: None -> "),
        (lambda: trained(tokens=2048), "tokens: 1024 -> 2048"),
    ):
        assert what in refused(call)
    afresh, resumed = trained(other, force=True)
    assert resumed is None and not torch.equal(afresh, first)
