"""The conversion benchmark measures what it says: a loadable checkpoint, real memory figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _common
import convert_speed


@pytest.mark.parametrize("gigabytes", [0.003, 0.05, 1.0, 3.4])
def test_the_shape_has_the_size_asked_for(gigabytes: float) -> None:
    config = convert_speed.shape(gigabytes)
    total = 0
    for dims in convert_speed.tensors(config).values():
        elements = 1
        for size in dims:
            elements *= size
        total += 2 * elements
    assert total == pytest.approx(gigabytes * 1e9, rel=0.15)
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 16


def test_the_checkpoint_loads_and_converts(tmp_path: Path) -> None:
    from mha2gqa.checkpoints.loading import load_model
    from mha2gqa.conversion.checkpoint import convert

    source = tmp_path / "source"
    described = convert_speed.write_checkpoint(source, 0.003, shards=3, seed=0)
    assert len(list(source.glob("*.safetensors"))) == 3
    stored = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert described["bytes"] < stored < described["bytes"] + 20_000
    model = load_model(source, dtype="float32", device="cpu")
    weight = model.model.layers[1].mlp.up_proj.weight
    assert 0.015 < weight.std() < 0.025  # normal numbers, as a trained layer's
    assert convert(source, tmp_path / "out", 4, method="mean").num_kv_heads == {"before": 16, "after": 4}


def test_watch_sees_anonymous_memory_and_not_files(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    file = tmp_path / "mapped"
    file.write_bytes(bytes(64 << 20))
    hold = "import time; {}; time.sleep(0.3)"
    grown = _common.watch([sys.executable, "-c", hold.format("x = bytearray(64 << 20)")])
    lines = [f"import mmap; f = open({str(file)!r}, 'rb')"]
    lines += ["m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)", "sum(m[::4096])"]
    mapped = "; ".join(lines)
    read = _common.watch([sys.executable, "-c", hold.format(mapped)])
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    inside = hold.format("x = bytearray(64 << 20)")
    child = _common.watch([sys.executable, "-c", starts.format(inside)])
    assert 60 < grown["peak_anonymous_mib"] < 100 and 60 < child["peak_anonymous_mib"] < 120
    assert read["peak_anonymous_mib"] < 40
    assert grown["seconds"] >= grown["seconds_to_exit"] > 0.3


def test_a_result_is_written_whole(tmp_path: Path) -> None:
    _common.write_json(tmp_path / "new" / "x.json", {"a": 1} | _common.provenance(seed=3))
    record = json.loads((tmp_path / "new" / "x.json").read_text())
    assert record["seed"] == 3 and record["versions"]["torch"] and record["hardware"]["cores"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]
