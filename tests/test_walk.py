"""The layer walk: one block at a time gives what the whole model gives; killed, it goes on; shared, it is the same."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from launching import launch, ranks, started
from safetensors.torch import load_file, save_file
from test_calibrated_fits import write_text
from walk_worker import FIT, OPTIONS, stop_after

import mha2gqa
from mha2gqa import progress
from mha2gqa.calibration import SecondMoments, load_statistics
from mha2gqa.checkpoints.atomic import PARTIAL
from mha2gqa.checkpoints.fingerprints import weights_fingerprint
from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.checkpoints.streaming import CheckpointLayers
from mha2gqa.conversion import CalibrationOptions, search, through_model, walk, walk_rows, work_dir
from mha2gqa.conversion.convert_result import ConvertResult
from mha2gqa.conversion.inputs import Inputs, calibration_inputs, split_held_out
from mha2gqa.conversion.work_dir import FinishedBlock, WorkDir
from mha2gqa.errors import CheckpointError, DataError, UsageError
from mha2gqa.reconstruct import ReconstructConfig, row_store
from mha2gqa.reconstruct.driver import Fitter
from mha2gqa.reconstruct.hidden_states import Stream
from mha2gqa.reconstruct.ranks import check_shared
from mha2gqa.reconstruct.row_store import Memory, RowStore
from mha2gqa.uptraining.run_dir import RunDirectory

WORKER = str(Path(__file__).with_name("walk_worker.py"))
LAYERS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "initializer_range": 0.3,
}


def llama(**changes: Any) -> Any:
    return pico_llama(num_hidden_layers=LAYERS, **changes)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def half() -> Any:
    return llama(attention_bias=True).bfloat16()


def experts() -> Any:
    """Experts that files hold one by one and the class fused."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES, intermediate_size=24, num_key_value_heads=8, num_local_experts=4, max_position_embeddings=64
    )
    return MixtralForCausalLM(config).eval()


def fused() -> Any:
    """One fused projection, partial rotary, biases."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        **SIZES, intermediate_size=48, num_key_value_heads=8, max_position_embeddings=64, pad_token_id=0,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def windows() -> Any:
    """Windowed and full layers in turn, full-width norms of q and k."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    config = Olmo3Config(
        **SIZES, intermediate_size=48, num_key_value_heads=8, max_position_embeddings=64, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return Olmo3ForCausalLM(config).eval()


def full_norms() -> Any:
    """OLMo-2: norms behind the blocks, and over all heads of q and k."""
    return of_type("olmo2")


def interleaved() -> Any:
    """Command R: attention and feed-forward side by side, pairs of neighbouring dims rotated."""
    return of_type("cohere", use_qk_norm=False)


def wide_heads() -> Any:
    """Gemma: heads whose widths do not add up to the model's."""
    return of_type("gemma", head_dim=8)


def of_type(name: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = SIZES | {"intermediate_size": 48, "num_key_value_heads": 8, "max_position_embeddings": 64}
    config = CONFIG_MAPPING[name](**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def exported() -> Any:
    """A class that has no KV-head count in transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=8, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


CLASSES = (llama, tied, half, experts, fused, windows, full_norms, interleaved, wide_heads, exported)
MODELS: dict[str, Callable[[], Any]] = {make.__name__: make for make in CLASSES}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text") / "text.jsonl", documents=20))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    word_tokenizer(folder)
    return folder


def blocks(source: Path, text: str) -> torch.Tensor:
    """The calibration text as blocks of 17 ids."""
    tokenizer = load_tokenizer(source)
    options = CalibrationOptions(texts=(text,), window=16)
    rows = calibration_inputs(tokenizer, open_checkpoint(source).config, options).rows
    assert isinstance(rows, torch.Tensor)
    return rows


def same(a: Path, b: Path) -> bool:
    return all((b / f.name).read_bytes() == f.read_bytes() for f in a.glob("*.safetensors"))


@dataclass(frozen=True)
class Made:
    """A saved model and its conversion in one go, which tests only read."""

    source: Path
    out: Path
    result: ConvertResult


@pytest.fixture(scope="module")
def made(text: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """`llama`, or `half` as for models too large for float32."""

    @cache
    def convert(name: str) -> Made:
        folder = tmp_path_factory.mktemp(name)
        source = save(MODELS[name](), folder / "source")
        with pytest.MonkeyPatch.context() as patch:
            if name == "half":
                patch.setattr(through_model, "FLOAT32_PARAMETERS", 0)
            result = mha2gqa.convert(source, folder / "out", 2, calibration=[text], **OPTIONS)
        return Made(source, folder / "out", result)

    return convert


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_read_one_by_one_give_what_the_model_in_memory_gives(
    name: str, text: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = save(MODELS[name](), tmp_path / "source")
    model = load_model(source, dtype="float32", device="cpu")
    whole = mha2gqa.convert_model(model, 2, calibration=blocks(source, text), fit=FIT)
    result = mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    streamed = load_model(tmp_path / "out", dtype="float32", device="cpu")
    stored = next(iter(open_checkpoint(source).tensors.values())).dtype
    want = {n: x.bfloat16().float() if stored == "BF16" else x for n, x in whole.state_dict().items()}
    got = streamed.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert result.calibration["losses"].keys() == {"original", "merged", "fitted"}
    assert not (tmp_path / "out.convert").exists()


@pytest.mark.parametrize("train", ["attention", "layer"])
def test_blocks_in_half_precision_give_what_the_model_in_memory_gives(
    train: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    source, fit = save(experts().bfloat16(), tmp_path / "source"), replace(FIT, train=train)
    model = load_model(source, dtype="bfloat16", device="cpu")
    want = mha2gqa.convert_model(model, 2, calibration=blocks(source, text), fit=fit).state_dict()
    monkeypatch.setattr(through_model, "FLOAT32_PARAMETERS", 0)  # as for models too large for float32
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS | {"fit": fit})
    got = load_model(tmp_path / "out", dtype="bfloat16", device="cpu").state_dict()
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("ahead", [True, False])
def test_every_block_is_loaded_once_and_at_most_the_next_one_beside_it(
    ahead: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    loaded, most = [], [0, 0]
    load, visit = CheckpointLayers.load, Fitter.visit

    def noting(self: CheckpointLayers, block: str) -> None:
        if any(p.is_meta for p in self.model.get_submodule(block).parameters()):
            loaded.append(block)
        load(self, block)

    def counting(self: Fitter, pairs: Any) -> Any:
        for i, model in enumerate((self.teacher.model, self.student.model)):
            present = [b for b in model.model.layers if not any(p.is_meta for p in b.parameters())]
            most[i] = max(most[i], len(present))
        return visit(self, pairs)

    monkeypatch.setattr(CheckpointLayers, "load", noting)
    monkeypatch.setattr(Fitter, "visit", counting)
    if not ahead:  # as with layers of many GB
        monkeypatch.setattr(walk, "AHEAD_BYTES", 1)
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert loaded == [f"model.layers.{i}" for i in range(LAYERS)]
    assert most == [2 if ahead else 1, 1]


@pytest.mark.parametrize(("name", "stored"), [("llama", False), ("windows", False), ("half", True)])
def test_searching_while_the_block_before_is_fitted_changes_no_byte(
    name: str, stored: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    source = save(MODELS[name](), tmp_path / "source")
    if stored:  # as for models too large for float32
        monkeypatch.setattr(through_model, "FLOAT32_PARAMETERS", 0)
    begun: list[list[str]] = []
    begin = walk.SearchBeside.__init__

    def noting(
        self: Any, plan: Any, read: Any, statistics: Any, options: Any, modules: Any, ranks: Any
    ) -> None:
        begun.append([module.path for module in modules])
        begin(self, plan, read, statistics, options, modules, ranks)

    monkeypatch.setattr(walk.SearchBeside, "__init__", noting)
    beside = mha2gqa.convert(source, tmp_path / "beside", 2, calibration=[text], **OPTIONS)
    assert begun == [[row["path"]] for row in beside.layers[1:]]
    monkeypatch.setattr(walk, "AHEAD_BYTES", 1)
    after = mha2gqa.convert(source, tmp_path / "after", 2, calibration=[text], **OPTIONS)
    assert len(begun) == len(beside.layers) - 1
    assert same(tmp_path / "beside", tmp_path / "after") and beside.layers == after.layers


def test_a_walk_that_ends_early_gives_up_the_search_beside_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    begun: list[Any] = []
    begin = walk.SearchBeside.__init__

    def searching(method: str, members: Any, seed: int, team: Any) -> None:
        team.each(time.sleep, [0.1] * 100)

    def noting(self: Any, *args: Any) -> None:
        monkeypatch.setattr(search, "_search", searching)
        begin(self, *args)
        begun.append(self)

    def interrupted(self: Fitter, pairs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(walk.SearchBeside, "__init__", noting)
    monkeypatch.setattr(Fitter, "visit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    (given_up,) = begun[0]._begun
    assert given_up.done() and given_up.exception(0) is not None


@pytest.mark.parametrize(
    ("layer", "words"),
    [(1, []), (1, ["stored"]), *(pytest.param(at, [], marks=pytest.mark.slow) for at in (0, LAYERS - 1))],
)
def test_a_killed_walk_goes_on_after_its_last_layer_with_the_same_bytes(
    layer: int,
    words: list[str],
    made: Callable[[str], Made],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = made("half" if words else "llama")
    source = whole.source
    if words:  # as for models too large for float32
        monkeypatch.setattr(through_model, "FLOAT32_PARAMETERS", 0)
    killed = started([WORKER, str(source), str(tmp_path / "out"), text, str(layer), *words], tmp_path)
    assert killed.code == -9 and not (tmp_path / "out").exists()
    seen: list[tuple[str, int, int | None]] = []
    with progress.reporting(progress.Callback(lambda *at: seen.append(at))):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert same(whole.out, tmp_path / "out")
    resumed = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert resumed["calibration"]["losses"] == whole.result.calibration["losses"]
    assert resumed["layers"] == whole.result.layers
    assert ("fitting", layer + 1, LAYERS) in seen
    assert not (tmp_path / "out.convert").exists()


def test_the_loss_of_the_merged_model_is_left_out_where_its_hidden_states_are_lost(
    made: Callable[[str], Made], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a damaged file of the last finished layer was deleted, as its error says."""
    whole = made("llama")
    source = whole.source
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    (tmp_path / "out.convert" / "block-0002.safetensors").unlink()
    resumed = mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert same(whole.out, tmp_path / "out")
    known = {name: loss for name, loss in whole.result.calibration["losses"].items() if name != "merged"}
    assert resumed.calibration["losses"] == known
    assert any("its loss is left out" in warning for warning in resumed.warnings)


def test_another_command_is_refused_by_what_changed_and_nothing_is_lost(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    kept = {p.name: p.read_bytes() for p in (tmp_path / "out.convert").glob("*.safetensors")}
    changed = OPTIONS | {"fit": ReconstructConfig(**{**vars(FIT), "steps": 13})}
    with pytest.raises(UsageError, match=r"2 finished layers .*fit\.steps: 12 -> 13.*force=True"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **changed)
    with pytest.raises(UsageError, match="seed: 0 -> 5"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], seed=5, **OPTIONS)
    weights = load_file(source / "model.safetensors")
    save_file({n: x + 1 if "layers.3" in n else x for n, x in weights.items()}, source / "model.safetensors")
    with pytest.raises(UsageError, match="source: "):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    with pytest.raises(
        UsageError, match=r"\(groups: 2 -> 4; "
    ):  # the option before the groupings that follow from it
        mha2gqa.convert(source, tmp_path / "out", 4, calibration=[text], **OPTIONS)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out.convert").glob("*.safetensors")} == kept
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], force=True, **changed)
    assert not (tmp_path / "out.convert").exists()


def test_a_file_that_has_changed_since_the_first_layers_is_seen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions and second moments by their contents, not by the names of their files."""
    source, partition, moments = save(llama(), tmp_path / "source"), tmp_path / "g.json", tmp_path / "st"
    words = OPTIONS | {"grouping": str(partition), "statistics": str(moments)}
    partition.write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    other = write_text(tmp_path / "other.jsonl", seed=9)
    merged = {"refit": False, "reconstruct": False, "calibration": [other]}
    mha2gqa.convert(source, tmp_path / "a", 2, **OPTIONS | {"statistics": str(moments)} | merged)
    kept = moments.read_bytes()
    moments.unlink()
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **words)
    partition.write_text("[[0, 2, 4, 6], [1, 3, 5, 7]]")
    with pytest.raises(UsageError, match=r"2 finished layers .*groupings\."):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **words)
    partition.write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    moments.write_bytes(kept)
    with pytest.raises(UsageError, match=r"2 finished layers .*measured_on"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **words)
    moments.unlink()
    with monkeypatch.context() as patch:  # the disk is full where the walk ends: another place is named
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(UsageError, match=r"st: cannot be written .*No space.*name another file, and run"):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **words)
    assert not list(tmp_path.glob("st*"))
    words["statistics"] = str(tmp_path / "elsewhere")
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **words)
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert set(map(str, manifest["grouping"].values())) == {"[[0, 1, 2, 3], [4, 5, 6, 7]]"}


def full(tensors: Any, path: Any, metadata: Any = None) -> None:
    if "st" in Path(path).name.split("."):
        raise OSError(errno.ENOSPC, "No space left on device")
    save_file(tensors, path, metadata)


def test_what_failed_before_its_first_layer_leaves_nothing_and_another_run_is_left_alone(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save(llama(), tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(through_model, "walked", lambda *_, **__: 1 / 0)
        mha2gqa.convert(source, out, 2, calibration=[text], **OPTIONS)
    assert not (tmp_path / "out.convert").exists()
    other = WorkDir(out)
    other.open({})
    with pytest.raises(UsageError, match="in use by process"):
        mha2gqa.convert(source, out, 2, calibration=[text], **OPTIONS)
    assert (other.root / "run.json").exists()
    other.close()


def test_a_step_that_is_too_small_for_the_processes_is_told_with_its_reason() -> None:
    check_shared(8, 8)
    check_shared(None, 8)
    with pytest.raises(UsageError, match="fits cannot be shared by 3 processes; start 1, 2, 4 or 8"):
        check_shared(None, 3)
    for blocks, processes, of, fix in (
        (6, 4, 0, "give a --fit batch_size"),
        (1, 2, 15, "give more text: a step takes an eighth of its 15 blocks"),
    ):
        with pytest.raises(
            UsageError, match=f"{blocks} blocks a step cannot be shared by {processes} .*{fix}"
        ):
            check_shared(blocks, processes, of)


def test_layers_half_deleted_are_those_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it makes room for other options, a run leaves nothing that the earlier options could go on from."""
    work = WorkDir(tmp_path / "out")
    work.open({"seed": 0})
    for number in range(3):
        work.put(number, FinishedBlock({"x": torch.zeros(1)}, {}, merged=torch.zeros(1)))
    work.close()
    deleted, unlink = [], Path.unlink

    def until_killed(path: Path, *args: Any, **words: Any) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path.name)
        unlink(path, *args, **words)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", until_killed)
        WorkDir(tmp_path / "out").open({"seed": 1}, restart=True)
    again = WorkDir(tmp_path / "out")
    assert again.open({"seed": 0}) == 0 and not list(again.root.glob("*.safetensors"))
    again.close()


def test_a_command_with_force_goes_on_as_it_was_begun(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    mha2gqa.convert(source, tmp_path / "out", 4)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], force=True, **OPTIONS)
    seen: list[tuple[str, int, int | None]] = []
    with progress.reporting(progress.Callback(lambda *at: seen.append(at))):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], force=True, **OPTIONS)
    assert ("fitting", 2, LAYERS) in seen and ("fitting", 1, LAYERS) not in seen


def test_a_folder_of_somebody_else_in_the_place_of_the_work_is_left_alone(text: str, tmp_path: Path) -> None:
    source, mine = save(llama(), tmp_path / "source"), tmp_path / "out.convert" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"out\.convert: is in the way and is not an unfinished conversion"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], force=True, **OPTIONS)
    assert mine.read_text() == "mine"


def test_work_that_was_killed_before_it_had_a_name_is_taken_up(tmp_path: Path) -> None:
    """A kill before the first file is in place leaves its partial file alone beside the lock."""
    for suffix, begin in ((".convert", lambda out: WorkDir(out).open({})), (".uptrain", open_run)):
        partial = tmp_path / f"out{suffix}" / f"run.json{PARTIAL}"
        partial.parent.mkdir()
        partial.write_text("{")
        assert not begin(tmp_path / "out")
        assert not partial.exists() and (partial.parent / "run.json").exists()


def open_run(out: Path) -> bool:
    run = RunDirectory(out)
    begun = run.open({})
    run.close()
    return begun


@pytest.mark.parametrize(
    ("name", "processes", "noise", "words"),
    [
        ("llama", 2, 1e-3, []),  # sums are taken in another order: float32 noise, grown over some Adam steps
        pytest.param("llama", 4, 1e-3, [], marks=pytest.mark.slow),
        ("half", 2, 2**-4, ["stored"]),  # noise of bfloat16, as much where gradients are sent in float32
    ],
)
def test_processes_share_the_text_and_make_the_same_model(
    name: str,
    processes: int,
    noise: float,
    words: list[str],
    made: Callable[[str], Made],
    text: str,
    tmp_path: Path,
) -> None:
    one = made(name)
    launch([WORKER, str(one.source), str(tmp_path / "many"), text, *words], tmp_path, processes)
    a, b = (load_file(folder / "model.safetensors") for folder in (one.out, tmp_path / "many"))
    for tensor, x in a.items():
        if x.dim() > 1 or not words:  # small gradients of biases are rounding alone, which Adam makes large
            assert (b[tensor] - x).float().norm() <= noise * x.float().norm(), tensor
    manifest = json.loads((tmp_path / "many" / "mha2gqa.json").read_text())
    assert manifest["grouping"] == {row["path"]: row["grouping"] for row in one.result.layers}
    assert manifest["calibration"]["losses"] == pytest.approx(
        one.result.calibration["losses"], rel=noise / 10
    )
    seconds = manifest["calibration"]["seconds_by_rank"]
    assert len(seconds) == processes and all(set(mine) == set(seconds[0]) for mine in seconds)
    assert {"statistics", "grouping", "fit", "saving"} <= set(seconds[0])
    assert "seconds_by_rank" not in one.result.calibration


def test_a_process_that_dies_ends_the_others_and_its_layers_are_kept(text: str, tmp_path: Path) -> None:
    source = save(llama(), tmp_path / "source")
    first, second = ranks([WORKER, str(source), str(tmp_path / "out"), text, "die:1"], tmp_path)
    assert second.code == 9 and first.code == 1
    assert "CheckpointError: convert: another process of the run has ended" in first.stderr
    assert "the same command resumes from the last finished layer" in first.stderr
    assert [p.name for p in (tmp_path / "out.convert").glob("block-*")] == ["block-0000.safetensors"]
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_under_the_walk_publishes_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    file, put = source / "model.safetensors", WorkDir.put

    def changing(self: WorkDir, number: int, *rest: Any) -> None:
        put(self, number, *rest)
        if number == 1:
            weights = load_file(file)
            save_file({name: x + 1 for name, x in weights.items()}, file, {"format": "pt"})

    monkeypatch.setattr(WorkDir, "put", changing)
    with pytest.raises(CheckpointError, match="changed"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_names_the_file_and_what_is_kept(
    made: Callable[[str], Made], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("llama").source
    saving = work_dir._save

    def full(path: Path, *rest: Any) -> None:
        if path.name == "block-0002.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        saving(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(work_dir, "_save", full)
        with pytest.raises(
            CheckpointError, match=r"block-0002.*No space left.*layers before it are kept.*free disk"
        ):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert same(made("llama").out, tmp_path / "out")


@pytest.mark.parametrize("place", ["host", "disk"])
def test_streams_elsewhere_give_the_same_bytes(
    place: str, made: Callable[[str], Made], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = made("llama")
    monkeypatch.setattr(walk_rows, "choose_place", lambda nbytes, device, sharing: place)
    far = mha2gqa.convert(near.source, tmp_path / "far", 2, calibration=[text], **OPTIONS)
    assert same(near.out, tmp_path / "far")
    said = [
        warning for warning in far.warnings if "do not fit in host memory: they are kept on disk" in warning
    ]
    assert len(said) == (place == "disk")


def test_page_locked_rows_are_counted_as_torch_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    power = 1 << 34
    assert [row_store.pinned_bytes(3 * n) for n in (power, power + 1)] == [3 * power, 6 * power]
    monkeypatch.setattr(row_store, "free_memory", lambda device: 6 * power)
    cuda = torch.device("cuda")
    assert [row_store.choose_place(3 * n, cuda) for n in (power, power + 1)] == ["host", "disk"]


def test_all_fits_bring_their_rows_ahead_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    made: list[Stream] = []

    def stream(device: torch.device) -> Stream:
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    row_store.side_stream.cache_clear()
    for _ in range(2):
        batches = row_store.Prefetched(((torch.tensor(i),) for i in count()), torch.device("cuda", 0))
        assert [int(x) for (x,) in islice(batches, 4)] == [0, 1, 2, 3]
    row_store.side_stream.cache_clear()
    assert len(made) == 1


def test_rows_lie_on_disk_where_the_processes_of_a_machine_would_fill_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "free_memory", lambda device: 100)
    cpu = torch.device("cpu")
    assert [row_store.choose_place(n, cpu) for n in (80, 81)] == ["device", "disk"]
    assert [row_store.choose_place(n, cpu, 4) for n in (20, 21)] == ["device", "disk"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_store.os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .No space left on device.*free space"):
        RowStore((4, 2), torch.float32, Memory("disk", folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = torch.randn(7, 3, 5)
    for place in ("device", "host", "disk"):
        store = RowStore(rows.shape, rows.dtype, Memory(place, folder=tmp_path))
        store.write(slice(0, 4), rows[:4])
        store.write(slice(4, 7), rows[4:])
        assert torch.equal(store.read(slice(2, 6)), rows[2:6])
        assert torch.equal(store.read(torch.tensor([6, 0, 3])), rows[[6, 0, 3]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_after_the_last_block_are_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().float()
    ids = torch.randint(64, (5, 9))
    stack = model.transformer.h if name == "exported" else model.model.layers
    prefix = "transformer.h" if name == "exported" else "model.layers"
    stream = Stream(model, ids, 2, [f"{prefix}.{i}" for i in range(len(stack))])
    assert stream.chained
    for _ in stack:
        stream.advance()
    with torch.no_grad():
        want = model(input_ids=ids).logits
    got = torch.cat([stream.logits(i) for i in range(3)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_saved_statistics_are_those_of_one_pass_over_the_whole_model(text: str, tmp_path: Path) -> None:
    source = save(llama(), tmp_path / "source")
    mha2gqa.convert(
        source, tmp_path / "out", 2, calibration=[text], statistics=str(tmp_path / "walked"), **OPTIONS
    )
    model = load_model(source, dtype="float32", device="cpu")
    seen, _ = walk_split(blocks(source, text))
    from mha2gqa.architectures import find_spec
    from mha2gqa.calibration import collect

    whole = collect(model, find_spec(open_checkpoint(source).config).in_memory(), seen.read)
    walked = load_statistics(tmp_path / "walked")
    assert walked.about == whole.about | {"weights": f"files {weights_fingerprint(source)}"}
    for key, moments in whole.modules.items():
        for name in ("inputs", "mixed", "queries"):
            torch.testing.assert_close(
                getattr(walked.modules[key], name), getattr(moments, name), rtol=1e-5, atol=1e-6
            )


def test_moments_that_are_saved_leave_the_device_with_their_layer(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    left: list[int] = []  # seen by each fit
    moved, cpu, visit = [], SecondMoments.cpu, Fitter.visit

    def moving(self: SecondMoments) -> SecondMoments:
        moved.append(self)
        return cpu(self)

    def counting(self: Fitter, pairs: Any) -> Any:
        left.append(len(moved))
        return visit(self, pairs)

    monkeypatch.setattr(SecondMoments, "cpu", moving)
    monkeypatch.setattr(Fitter, "visit", counting)
    kept = str(tmp_path / "moments")
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], statistics=kept, **OPTIONS)
    assert left == list(range(1, LAYERS + 1))


def walk_split(rows: torch.Tensor) -> tuple[Inputs, Inputs | None]:
    return split_held_out(Inputs(rows))


def test_a_layer_that_is_not_finite_is_named(text: str, tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    source = save(model, tmp_path / "source")
    with pytest.raises((CheckpointError, DataError), match=r"layers\.3\.self_attn"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_memory_that_does_not_suffice_says_what_to_try_and_keeps_what_is_done(
    made: Callable[[str], Made], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("llama").source
    visit = Fitter.visit

    def exhausted(self: Fitter, pairs: Any) -> Any:
        if ".2." in pairs[0].module.path:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return visit(self, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(Fitter, "visit", exhausted)
        with pytest.raises(CheckpointError, match=r"layers\.2: out of memory.*4 blocks of 16 .*batch_size=2"):
            mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    assert same(made("llama").out, tmp_path / "out")
