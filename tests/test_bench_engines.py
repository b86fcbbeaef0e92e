"""`bench --engine`: other engines are found, given the model, asked, and put into the same table; what they lack is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_tokenizer
from pico_models import model_class, pico_config
from transformers import LlamaConfig

from mha2gqa.assets import tiny_model_path
from mha2gqa.commands import bench as bench_module
from mha2gqa.commands import bench_engines
from mha2gqa.commands.bench import bench
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError
from mha2gqa.kv_cache import kv_bytes
from mha2gqa.report.terminal import render

SOURCES = os.environ.get("LLAMA_CPP", "")  # of the real llama.cpp

# A llama-batched-bench that answers as the real one does, and writes down what it was asked.
TOOL = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
here = pathlib.Path(__file__).parent
if "--version" in words:
    print("version: 1.2 (build 7, commit abc)\\nbuilt with cc", file=sys.stderr)
elif "--list-devices" in words:
    print("Available devices:{devices}")
else:
    (here / "asked.json").write_text(json.dumps(words))
    value = lambda flag: words[words.index(flag) + 1]
    pp, tg, pl = int(value("-npp").split(",")[0]), int(value("-ntg")), int(value("-npl"))
    if not pathlib.Path(value("-m")).exists():
        sys.exit("error: unable to load model")
    print("llama_kv_cache: size =    2.00 MiB (   256 cells,   2 layers,  2/ 2 seqs), K (f16): 1 MiB", file=sys.stderr)
    for pp in (pp, 1):
        n_kv = {n_kv}
        print(json.dumps(dict(pp=pp, tg=tg, pl=pl, n_kv=n_kv, t_pp=0.5, t_tg=0.01 * tg, n_threads=3)))
"""
CONVERTER = """
import argparse, pathlib, sys
if "--print-supported-models" in sys.argv:
    sys.exit(print("Text models:\\n  - LlamaForCausalLM"))
p = argparse.ArgumentParser(); p.add_argument("model"); p.add_argument("--outfile"); p.add_argument("--outtype")
a = p.parse_args()
pathlib.Path(a.outfile).write_bytes(bytes(1000 if a.outtype == "f16" else 500))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "llama"
    torch.manual_seed(0)
    model_class("llama")(pico_config("llama")).save_pretrained(folder)
    return word_tokenizer(folder)


def programs(folder: Path, n_kv: str = "pl * (pp + tg)", devices: str = "") -> Path:
    """A folder with the fake tool."""
    folder.mkdir()
    tool = folder / "llama-batched-bench"
    tool.write_text(TOOL.format(python=sys.executable, n_kv=n_kv, devices=devices))
    tool.chmod(0o755)
    return folder


def sources(folder: Path, script: str = CONVERTER) -> Path:
    """Sources of llama.cpp whose converter is `script`."""
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "base.py").write_text("")
    (folder / "convert_hf_to_gguf.py").write_text(script)
    return folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine of this machine, and a quick copy."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setattr(bench_module, "copy_bandwidth", lambda device: 1e6)


def test_llama_cpp_measures_a_folder_and_a_file_in_the_same_table(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "grouped.gguf"
    file.write_bytes(bytes(250))
    tools = programs(tmp_path / "bin")
    result = bench(
        [model, file], engine="llama.cpp", batch=2, context=64, new_tokens=4, cache_type="q8_0", threads=3,
        engine_path=tools, llama_cpp=sources(tmp_path / "src"),
    )  # fmt: skip
    assert (result.engine, result.device) == ("llama.cpp 1.2 (build 7, commit abc)", "cpu")
    folder, grouped = result.models
    assert folder["tokens_per_second"] == pytest.approx(200) and folder[
        "milliseconds_per_step"
    ] == pytest.approx(10)
    assert folder["first_token_milliseconds"] == 500 and folder["prefill_tokens_per_second"] == 120
    assert (folder["weight_bytes"], grouped["weight_bytes"]) == (1000, 250)
    assert folder["kv_bytes"] == 2 * 2**20 * 64 // 256 and folder["step_bytes"] == 1000 + folder["kv_bytes"]
    assert folder["bytes_per_second"] == pytest.approx(folder["step_bytes"] / 0.01)
    assert folder["share_of_bandwidth"] == pytest.approx(folder["bytes_per_second"] / 1e6)
    asked = json.loads((tools / "asked.json").read_text())
    assert asked[asked.index("-c") + 1 :][:7] == ["128", "-npp", "60,1", "-ntg", "4", "-npl", "2"]
    assert asked[asked.index("-ctk") + 1] == asked[asked.index("-ctv") + 1] == "q8_0"
    assert asked[-4:] == ["-t", "3", "-dev", "none"]
    said = render(result.to_dict())
    assert "llama.cpp 1.2 (build 7, commit abc): batch 2" in said and "flash, q8_0 cache" in said


def test_another_precision_is_exported_and_an_accelerator_has_no_ceiling(model: Path, tmp_path: Path) -> None:
    tools = programs(tmp_path / "bin", devices="\\n  CUDA0: a card (80 MiB)")
    result = bench(
        model,
        engine="llama.cpp",
        context=4096,
        precision="q8_0",
        engine_path=tools,
        llama_cpp=sources(tmp_path / "s"),
    )
    [row] = result.models
    assert (result.device, result.dtype, row["weight_bytes"]) == ("CUDA0", "q8_0", 500)
    assert result.context == 128 and "context is 128, not 4,096" in result.warnings[0]
    assert result.copy_bandwidth is None and row["share_of_bandwidth"] is None and row["step_bytes"]


def test_a_tokenizer_that_the_converter_does_not_know_is_no_hindrance(model: Path, tmp_path: Path) -> None:
    """How text is split does not change the speed: another name is taken."""
    asks = CONVERTER.replace(
        "a = p.parse_args()", "a = p.parse_args()\nfrom conversion.base import B; B().get_vocab_base_pre(0)"
    )
    src = sources(tmp_path / "src", asks)
    refuses = (
        "class B:\n    def get_vocab_base_pre(self, t): raise NotImplementedError('get_vocab_base_pre')\n"
    )
    (src / "conversion" / "base.py").write_text(refuses)
    words: dict[str, Any] = {"engine_path": programs(tmp_path / "bin"), "llama_cpp": src}
    assert bench(model, engine="llama.cpp", context=16, **words).models[0]["weight_bytes"] == 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"engine": "exllama"}, "engine: must be one of transformers, llama.cpp, vllm"),
        ({"cache_type": "q8_0"}, "cache_type: is for llama.cpp, not for transformers"),
        ({"threads": 2}, "threads: is for llama.cpp"),
        ({"engine": "vllm", "precision": "q8_0"}, "precision: is for llama.cpp, not for vllm"),
        ({"engine": "llama.cpp", "memory": [1e9]}, "memory: is for transformers, not for llama.cpp"),
        ({"engine": "llama.cpp", "dtype": "float32"}, "dtype: is for transformers and vllm"),
        ({"engine": "vllm", "compile": False}, "compile: is for transformers"),
        ({"engine": "llama.cpp", "cache_type": "q2"}, "cache_type: must be one of f16, q8_0, q4_0"),
        ({"engine": "llama.cpp", "threads": 0}, "threads: must be >= 1"),
        ({"engine": "llama.cpp"}, "no program llama-batched-bench on PATH; build llama.cpp"),
        ({"engine": "llama.cpp", "engine_path": "."}, "engine_path .: no program llama-batched-bench there"),
        ({"engine": "vllm"}, "pip install vllm"),
    ],
)  # fmt: skip
def test_what_an_engine_lacks_and_engines_that_are_missing_are_named(
    words: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        bench(model, **words)
    with pytest.raises(UsageError, match=r"x\.gguf: is for llama\.cpp; use engine=\"llama\.cpp\""):
        bench("x.gguf")


def test_nothing_is_built_before_every_model_is_known_to_run(model: Path, tmp_path: Path) -> None:
    tools, src = programs(tmp_path / "bin"), sources(tmp_path / "src")
    words: dict[str, Any] = {"engine": "llama.cpp", "engine_path": tools, "llama_cpp": src}
    for name, config, message in (
        ("own", {"model_type": "gqa_gpt2"}, "runs in transformers only"),
        (
            "new",
            {"model_type": "brandnew", "architectures": ["BrandNewForCausalLM"]},
            "lacks BrandNewForCausalLM",
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=message):
            bench([model, tmp_path / name], **words)
    with pytest.raises(UsageError, match=r"no such folder; llama\.cpp takes local folders"):
        bench([model, "org/name"], **words)
    with pytest.raises(UsageError, match="no such file"):
        bench([model, tmp_path / "absent.gguf"], **words)
    with pytest.raises(UsageError, match="llama_cpp or LLAMA_CPP"):
        bench(model, engine="llama.cpp", engine_path=tools)
    (tmp_path / "is.gguf").write_bytes(b"0")
    with pytest.raises(UsageError, match="has its precision already"):
        bench([tmp_path / "is.gguf"], precision="f16", **words)
    assert not (tools / "asked.json").exists()


def test_faults_of_the_tool_are_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"0")
    shared = programs(tmp_path / "old", n_kv="pp + pl * tg")
    with pytest.raises(UsageError, match=r"use a newer llama\.cpp"):
        bench(file, engine="llama.cpp", batch=2, engine_path=shared)
    silent = programs(tmp_path / "silent")
    (silent / "llama-batched-bench").write_text(
        f"#!{sys.executable}\nimport sys\nif '-m' in sys.argv: print('{{}}')\n"
    )
    with pytest.raises(CheckpointError, match="measured nothing"):
        bench(file, engine="llama.cpp", engine_path=silent)
    broken = programs(tmp_path / "broken")
    (broken / "llama-batched-bench").write_text(
        f"#!{sys.executable}\nimport sys\nif '-m' in sys.argv: sys.exit('main: error: unable to load model')\n"
    )
    with pytest.raises(CheckpointError, match="llama-batched-bench: main: error: unable to load model"):
        bench(file, engine="llama.cpp", engine_path=broken)
    monkeypatch.setattr(bench_module, "free_memory", lambda device: 10)
    with pytest.raises(UsageError, match="does not fit"):
        bench(
            model,
            engine="llama.cpp",
            context=64,
            engine_path=programs(tmp_path / "bin"),
            llama_cpp=sources(tmp_path / "s"),
        )


# --- vLLM ----------------------------------------------------------------------------------------------

VLLM = """#!{python}
import json, sys
job = json.loads(sys.stdin.read())
print("INFO: noise")
if "about" in job:
    known = [names != ["BrandNewForCausalLM"] for names in job["about"]]
    print(json.dumps({{"version": "9", "device": "cpu", "asked": job["about"], "known": known}}))
elif job["batch"] > 4:
    print(json.dumps({{"usage": "vLLM's cache holds 8 tokens", "fix": "use batch 4"}}))
elif job["batch"] == 3:
    sys.exit("Traceback\\nRuntimeError: the engine fell over")
else:
    assert job["prompt"] == 12 and job["steps"] == 4 and job["cache_bytes"] > 0
    print(json.dumps({{"seconds": 0.5, "first_token_seconds": 2.0, "itemsize": 2, "tensors": {{"a": 100}},
                      "weight_bytes": 100, "attention": "paged", "warnings": ["slow"]}}))
"""


def test_vllm_is_asked_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(VLLM.format(python=sys.executable))
    python.chmod(0o755)
    words: dict[str, Any] = {"engine": "vllm", "engine_path": python, "context": 16, "new_tokens": 4}
    result = bench(model, batch=2, **words)
    [row] = result.models
    assert (result.engine, result.device) == ("vllm 9", "cpu")
    assert row["tokens_per_second"] == 4 and row["prefill_tokens_per_second"] == 6
    assert row["step_bytes"] == 100 + row["kv_bytes"] and row["warnings"] == ["slow"]
    with pytest.raises(UsageError, match="holds 8 tokens; use batch 4"):
        bench(model, batch=5, **words)
    with pytest.raises(CheckpointError, match="the engine fell over"):
        bench(model, batch=3, **words)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(
        '{"model_type": "x", "architectures": ["BrandNewForCausalLM"]}'
    )
    with pytest.raises(UnsupportedModelError, match="vLLM lacks BrandNewForCausalLM"):
        bench([model, tmp_path / "new"], **words)
    with pytest.raises(UnsupportedModelError, match="transformers only"):
        (tmp_path / "new" / "config.json").write_text('{"model_type": "gqa_t5"}')
        bench(tmp_path / "new", **words)


def for_engines(folder: Path) -> Path:
    """A model whose heads are as wide as engines want them, with a tokenizer that they know."""
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    model_class("llama")(LlamaConfig(vocab_size=8192, intermediate_size=256, **shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model_path() / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    "MHA2GQA_LLAMA_CPP_BIN" not in os.environ, reason="make engines-bench builds llama.cpp's programs"
)
def test_the_real_llama_cpp_decodes_a_folder_and_says_how_large_its_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP", SOURCES)
    model = for_engines(tmp_path / "model")
    convert(model, tmp_path / "out", 2)
    for cache, bits in (("f16", 16.0), ("q8_0", 8.5)):
        words: dict[str, Any] = {"engine_path": os.environ["MHA2GQA_LLAMA_CPP_BIN"], "cache_type": cache}
        result = bench(
            [model, tmp_path / "out"], engine="llama.cpp", batch=2, context=128, new_tokens=8, **words
        )
        full, grouped = result.models
        assert (
            result.device == "cpu" and full["tokens_per_second"] > 0 and full["first_token_milliseconds"] > 0
        )
        numbers = kv_bytes(
            json.loads((model / "config.json").read_text()), batch=2, context=128, dtype_bytes=1
        )
        assert full["kv_bytes"] == pytest.approx(
            numbers * bits / 8, abs=11_000
        )  # said in hundredths of a MiB
        assert grouped["kv_bytes"] < full["kv_bytes"] and grouped["weight_bytes"] < full["weight_bytes"]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(os.environ.get("MHA2GQA_VLLM", "absent")).exists(), reason="make engines-vllm installs vLLM"
)
def test_the_real_vllm_decodes_a_folder(tmp_path: Path) -> None:
    model = for_engines(tmp_path / "model")
    convert(model, tmp_path / "out", 2)
    words: dict[str, Any] = {"engine_path": os.environ["MHA2GQA_VLLM"], "dtype": "float32"}
    full, grouped = bench(
        [model, tmp_path / "out"], engine="vllm", batch=2, context=96, new_tokens=16, **words
    ).models
    assert full["tokens_per_second"] > 0 and grouped["tokens_per_second"] > 0
    assert full["kv_bytes"] == 4 * grouped["kv_bytes"] and full["weight_bytes"] > grouped["weight_bytes"]


def test_what_runs_beside_vllm_imports_nothing_of_the_package() -> None:
    text = bench_engines.VLLM_SCRIPT.read_text()
    assert "from ." not in text and "mha2gqa" not in text
