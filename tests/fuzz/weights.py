"""Weight files: headers, shards, indexes and pickles; safetensors and torch themselves say what is right."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from .mutations import ODD, changed_bytes, changed_json
from .trial import Room, Trial

HEADER_CHANGES = (
    "offsets", "offsets", "shape", "dtype", "swap", "overlap", "hole", "twice", "length", "short", "long", "metadata",
    "entry", "raw", "rename", "more", "less", "turned", "none",
)  # fmt: skip
DTYPES = (
    "F16", "BF16", "F64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "U32", "U64", "F4", "C64",
    "f32", "", None, 32, [], "F32 ",
)  # fmt: skip


def make_model(folder: Path, shards: bool = False, vocabulary: int = 32) -> None:
    """The smallest Llama, in one file or many."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="4KB" if shards else "1GB")


# --- what is right --------------------------------------------------------------------------------------


def by_safetensors(folder: Path) -> dict[str, Tensor] | str:
    """Every tensor of a folder as the library reads it; a word where it refuses."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.rglob("*.safetensors")):
            with safe_open(str(file), "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except BaseException as error:
        return str(error)[:60]
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def pooled(x: Tensor, groups: int) -> Tensor:
    """The mean of neighbouring heads of 4 rows, written without the code under test."""
    heads = x.float().reshape(4, 4, *x.shape[1:])
    parts = [
        sum(heads[i * 4 // groups + j] for j in range(4 // groups)) / (4 // groups) for i in range(groups)
    ]
    return torch.cat(parts).to(x.dtype)


def judge(right: dict[str, Tensor] | str, out: Path, groups: int, pools: bool = True) -> str:
    """Empty, or how a conversion is not the mean pooling of its source."""
    found = by_safetensors(out)
    if isinstance(found, str):
        return f"safetensors refuses the result: {found}"
    if isinstance(right, str):
        return f"safetensors refuses the source ({right}), and it is converted"
    if right.keys() != found.keys():
        return f"other tensors: {sorted(right.keys() ^ found.keys())[:2]}"
    for name, x in right.items():
        if ".k_proj.weight" in name or ".v_proj.weight" in name:
            wanted = pooled(x, groups) if pools else found[name]
            if wanted.shape != found[name].shape or not torch.allclose(
                wanted.float(), found[name].float(), rtol=1e-2, atol=1e-5, equal_nan=True
            ):
                return "a pooled tensor is wrong"
        elif not same(x, found[name]):
            return "an unchanged tensor is changed"
    return ""


# --- headers ------------------------------------------------------------------------------------------


def parsed(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def changed_header(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A safetensors file whose header says something else than its numbers are; and how."""
    header, body = parsed(data)
    raw: str | None = None
    length: int | None = None
    said = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        names = [n for n in header if n != "__metadata__"]
        if not names:  # an earlier change has taken the only one
            break
        kind, name = rng.choice(HEADER_CHANGES), rng.choice(names)
        said.append(f"{kind} {name}")
        entry = header[name]
        if not isinstance(entry, dict) or not isinstance(entry.get("data_offsets"), list):
            continue
        other = header[rng.choice(names)]
        if kind in ("offsets", "shape", "dtype", "entry", "metadata", "overlap", "swap", "hole"):
            body = _changed_entry(rng, header, name, other, kind, body)
        elif kind == "twice":
            raw = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(other)}}}"
        elif kind == "length":
            length = rng.choice(
                (0, 1, 7, 2**20, 2**31, 2**63, 2**64 - 1, len(json.dumps(header)) + rng.choice((-1, 1, 8)))
            )
        elif kind == "short":
            body = body[: rng.choice((0, 1, len(body) // 2, len(body) - 1))]
        elif kind == "long":
            body += b"\x77" * rng.choice((1, 4, 64))
        elif kind == "raw":
            raw = rng.choice(("[]", "null", "3", "", " ", "{", "{}", "[" * 3000, "1" * 5000, '{"__metadata__": {}}',
                              json.dumps(header) + " " * 9, " " + json.dumps(header)))  # fmt: skip
        elif kind == "rename":
            header[
                rng.choice(("", "x", name.upper(), "../x", "a\0b", "é", name.replace("0", "99999999999")))
            ] = header.pop(name)
        elif kind == "more":
            header["model.layers.1.self_attn.k_proj.weight"] = dict(entry)
        elif kind == "less":
            del header[name]
        if raw is None and kind == "turned" and body:
            at = rng.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    text = (json.dumps(header) if raw is None else raw).encode("utf-8", "surrogatepass")
    made = struct.pack("<Q", len(text) if length is None else length) + text + body
    if rng.random() < 0.05:
        made, how = changed_bytes(rng, made)
        said.append(how)
    return made, "; ".join(said)


def _has_place(entry: Any) -> bool:
    """Whether an entry of a header still says where its tensor lies."""
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(place, list) and len(place) == 2 and all(type(x) is int for x in place)


def _changed_entry(
    rng: Random, header: dict[str, Any], name: str, other: Any, kind: str, body: bytes
) -> bytes:
    entry = header[name]
    if not _has_place(entry):  # an earlier change has broken it already
        return body
    begin, end = entry["data_offsets"]
    shape = entry.get("shape")
    if not isinstance(shape, list) or not shape or not all(isinstance(n, int) for n in shape):
        shape = [1]  # an earlier change has broken it already
    if kind == "offsets":
        entry["data_offsets"] = rng.choice((
            [begin, end - 4], [begin + 4, end], [begin, end + 64], [end, begin], [-4, end], [begin, begin], [begin],
            [begin, end, end], [float(begin), float(end)], [str(begin), str(end)], None, [begin, 2**40], [True, False],
        ))  # fmt: skip
    elif kind == "shape":
        entry["shape"] = rng.choice((
            shape[::-1], [], [0], [-1], [*shape, 1], [shape[0] // 2, *shape[1:]], [2**40, 2**40], "16", None,
            [float(x) for x in shape], [str(x) for x in shape], [shape[0] * 2, *shape[1:]],
        ))  # fmt: skip
    elif kind == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == "entry":
        header[name] = rng.choice((None, [], 3, "x", {}, {"dtype": "F32"}, {**entry, "more": 1}))
    elif kind == "metadata":
        header["__metadata__"] = rng.choice((None, [], 3, {"a": 1}, {"a": None}, {"format": "tf"}, {}))
    elif _has_place(other):
        if kind == "overlap":
            entry["data_offsets"] = [other["data_offsets"][0], other["data_offsets"][0] + end - begin]
        elif kind == "swap":
            entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
        else:
            for each in header.values():
                if _has_place(each) and each["data_offsets"][0] >= end:
                    each["data_offsets"] = [x + 4 for x in each["data_offsets"]]
            body = body[:end] + b"\x55" * 4 + body[end:]
    return body


def header(rng: Random, room: Room) -> Trial:
    """A file that is opened, and sometimes converted."""
    source = room.made("header", make_model)
    good = room.kept(source / "model.safetensors")
    data, said = changed_header(rng, good)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_bytes(data)
    right = by_safetensors(source)

    def opened() -> str:
        from mha2gqa.checkpoints.reader import Checkpoint

        checkpoint = Checkpoint(source)
        if isinstance(right, str):
            return f"safetensors refuses it ({right})"
        if right.keys() != checkpoint.tensors.keys():
            return "other names than safetensors finds"
        return "" if all(same(x, checkpoint.read(name)) for name, x in right.items()) else "other numbers"

    if rng.random() < 0.06:
        return Trial(
            "header, converted", said, lambda: converted(room, source, right), {"model.safetensors": data}
        )
    return Trial("header", said, opened, {"model.safetensors": data})


def converted(room: Room, source: Path, right: dict[str, Tensor] | str, groups: int = 2) -> str:
    """Convert a source and judge the result."""
    import mha2gqa

    out = room.fresh("out")
    mha2gqa.convert(str(source), str(out), groups, method="mean")
    return judge(right, out, groups)


def shard(rng: Random, room: Room) -> Trial:
    """A file without attention tensors beside others: its tensors are copied as bytes."""
    source = room.made("shards", lambda folder: make_model(folder, shards=True))
    where = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    attention = {file for name, file in where.items() if "self_attn" in name}
    file = source / rng.choice(sorted(set(where.values()) - attention))
    good = room.kept(file)
    data, said = changed_header(rng, good)
    file.unlink()
    file.write_bytes(data)
    right = by_safetensors(source)

    def run() -> str:
        try:
            return converted(room, source, right)
        finally:
            file.unlink()
            file.write_bytes(good)

    return Trial("shard, converted", said, run, {file.name: data})


def index(rng: Random, room: Room) -> Trial:
    """An index that names other files, or other tensors."""
    import mha2gqa

    source = room.made("indexed", lambda folder: make_model(folder, shards=True))
    place = source / "model.safetensors.index.json"
    good = json.loads(room.kept(place))
    document = copy.deepcopy(good)
    name, files = rng.choice(sorted(document["weight_map"])), sorted(set(document["weight_map"].values()))
    odd = rng.choice(
        (*ODD, *files, "../x.safetensors", f"./{files[0]}", f"{files[0]}\0", "config.json", ".", "..")
    )
    kind = rng.choice(("one", "all", "less", "more", "map", "total", "json"))
    said = f"{kind} {name} {str(odd)[:30]!r}"
    if kind == "json":
        data, said = changed_json(rng, good, ("weight_map", "metadata"))
    else:
        target = document["weight_map"]
        if kind == "one":
            target[name] = odd
        elif kind == "all":
            document["weight_map"] = dict.fromkeys(target, odd)
        elif kind == "less":
            del target[name]
        elif kind == "more":
            target[rng.choice(("x", "", name + "x"))] = files[0]
        elif kind == "map":
            document["weight_map"] = odd
        else:
            document["metadata"] = odd
        data = json.dumps(document).encode("utf-8", "surrogatepass")
    place.write_bytes(data)
    if rng.random() < 0.15:
        right = by_safetensors(source)
        return Trial("index, converted", said, lambda: converted(room, source, right), {place.name: data})
    return Trial("index", said, lambda: str(mha2gqa.plan(str(source), groups=2))[:0], {place.name: data})


def pickled(rng: Random, room: Room) -> Trial:
    """A `pytorch_model.bin`, damaged or of another kind."""
    source = room.made("pickled", _make_pickled)
    file = source / "pytorch_model.bin"
    state = torch.load(source / "good.pt", weights_only=True)
    kind = rng.choice(("bytes", "bytes", "bytes", "wrapped", "more", "none", "old", "views", "dtype"))
    how = kind
    room.keep_out(file)
    if kind == "wrapped":
        torch.save(rng.choice(({"state_dict": state}, [state], {"model": state, "epoch": 1}, 3, None)), file)
    elif kind == "more":
        torch.save(state | {rng.choice(("x", "", 3, "a._extra_state")): rng.choice((None, 3, [], "x"))}, file)
    elif kind == "views":
        name = rng.choice(sorted(state))
        torch.save(
            state | {name: state[name].t().contiguous().t() if state[name].dim() == 2 else state[name]}, file
        )
    elif kind == "dtype":
        name = rng.choice(sorted(state))
        torch.save(
            state | {name: state[name].to(rng.choice((torch.float16, torch.int8, torch.complex64)))}, file
        )
    else:
        torch.save(state, file, _use_new_zipfile_serialization=kind != "old")
    data = file.read_bytes()
    if kind == "bytes":
        data, how = changed_bytes(rng, data)
        file.unlink()
        file.write_bytes(data)
    right = _by_torch(file)

    def opened() -> str:
        from mha2gqa.checkpoints.reader import Checkpoint

        checkpoint = Checkpoint(source)
        if right is None:
            return "torch finds no tensors in it"
        if right.keys() != checkpoint.tensors.keys():
            return "other names than torch finds"
        return "" if all(same(x, checkpoint.read(name)) for name, x in right.items()) else "other numbers"

    return Trial("pickle", how, opened, {file.name: data})


def _make_pickled(folder: Path) -> None:
    from safetensors.torch import load_file

    make_model(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "good.pt")
    (folder / "model.safetensors").unlink()


def _by_torch(file: Path) -> dict[str, Tensor] | None:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)  # wherever it was saved
    except BaseException:
        return None
    if not isinstance(found, dict):
        return None
    found = {name: x for name, x in found.items() if x is not None and not str(name).endswith("_extra_state")}
    return found if all(isinstance(x, Tensor) for x in found.values()) else None
