"""Calibration text without a data set: documents that the original model samples itself, kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.atomic import replacing, writing_to
from ..checkpoints.batch_log import BatchLog, remove_left
from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hub import local_path
from ..checkpoints.json_files import read_json
from ..checkpoints.loading import (
    free_memory,
    load_config_json,
    load_model,
    load_tokenizer,
    resolve_device,
    weight_bytes,
)
from ..checkpoints.reader import open_checkpoint
from ..data.encoding import bos_id
from ..errors import CheckpointError, UsageError
from ..kv_cache import known_config, kv_bytes, max_batch
from ..progress import current

logger = logging.getLogger(__name__)

MOST_ROWS, CPU_ROWS = 256, 64  # sequences sampled at a time: a batch, which a kill loses
RESERVE = 0.3  # of the free memory, for activations and logits
CALIBRATION, DATA = "--calibration", "--data"  # the options that take `generate`


def generate_text(
    model: str | Path,
    out: str | Path,
    *,
    tokens: int,
    window: int = 2048,
    seed: int = 0,
    device: str = "auto",
    trust_remote_code: bool = False,
    option: str = CALIBRATION,
    original: str | None = None,
) -> dict[str, Any]:
    """Sample documents from `model` at temperature 1, without truncation of its distribution.

    A file that the same model, seed and sizes made is used again; its hash is checked. Until all is sampled, finished
    batches are in `OUT.batches`, and the same call goes on after the last of them.

    Args:
        model: Folder or hub id of a decoder.
        out: The JSONL file to write (`{"text": …}` a line); `OUT.json` beside it says what made it.
        tokens: Tokens to sample, at least.
        window: Tokens of a document, at most.
        seed: Of the sampling.
        device: Where the model runs.
        trust_remote_code: Consent to code that the model brings along.
        option: Which asked for it, for messages.
        original: Fingerprint of the checkpoint that `model` was made from, which counts as the writer; `model` itself
            by default.

    Returns:
        `model`, `tokens`, `documents`, `window`, `seed`, `sha256`.

    Raises:
        UsageError: An encoder-decoder, a tokenizer without a start token, model and cache do not fit the device, or
            `out` is a file that was not sampled, or was changed since; nothing is loaded or written. Or another
            process samples it.

    Example:
        >>> generate_text("llama-2-7b", "generated.jsonl", tokens=524_288)["documents"]  # doctest: +SKIP
        1321
    """
    check_decoder(load_config_json(model), option)
    out, original = Path(out), original or _fingerprint(model)
    wanted = {"model": original, "window": window, "seed": seed}
    record = written_by(original, out)
    batches = out.with_name(f"{out.name}.batches")
    if record is not None and wanted.items() <= record.items() and record["tokens"] >= tokens:
        remove_left(batches)
        return record
    _refuse_changed(out, option)
    where = resolve_device(device)
    start, end, most = check_writer(
        model, window=window, device=where, trust_remote_code=trust_remote_code, option=option
    )
    with BatchLog(batches, wanted | {"tokens": tokens}) as log:
        count = sum(batch["tokens"] for batch in log)
        if count < tokens:
            rows = len(log[0]["texts"]) if log else math.ceil(tokens / window)
            if log:
                logger.info("%s: going on after %d of %d tokens", out, count, tokens)
                current().stage("generating", tokens, "tokens", start=count)
            running = load_model(model, device=where, trust_remote_code=trust_remote_code)
            writer = _Writer(running, load_tokenizer(model, trust_remote_code), start, end, window)
        while count < tokens:
            log.append(writer.batch(min(rows, most), batch_seed(seed, len(log))))
            count += log[len(log) - 1]["tokens"]
            current().report("generating", min(count, tokens), tokens, "tokens")
        documents = sum(len(batch["texts"]) for batch in log)
        record = _keep(out, _lines(log), wanted | {"tokens": count, "documents": documents})
        log.remove()
    return record


def batch_seed(seed: int, number: int) -> int:
    """The seed of a batch, the first of which has `seed` itself.

    A batch is the same whether those before it are sampled now or were before.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7]) if number else seed


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of `seed` inside, the caller's afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def copy_sampled(file: Path, to: Path) -> None:
    """Bring text that was sampled to a place where it is asked for again, unless something lies there."""
    record = _record_of(file)
    if record is not None and not to.exists():
        with writing_to(to):
            to.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as lines:
            _keep(to, lines, record)


def _lines(log: BatchLog) -> Iterator[bytes]:
    """The documents as they are published; one without a word has no line."""
    for batch in log:
        yield from (json.dumps({"text": text}).encode() + b"\n" for text in batch["texts"] if text)


def _keep(out: Path, lines: Iterable[bytes], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write text and record; text that lies there without its record was never made here, whenever this is killed.

    Returns:
        The record: `about` and the `sha256` of the text.
    """
    digest = hashlib.sha256()
    with writing_to(out), replacing(out) as partial:
        with partial.open("wb") as file:
            for line in lines:
                digest.update(line)
                file.write(line)
        record = dict(about) | {"sha256": digest.hexdigest()}
        out.unlink(missing_ok=True)
        with replacing(_record_file(out)) as beside:
            beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _refuse_changed(out: Path, option: str) -> None:
    """Refuse to write over text that somebody has changed, or that was not sampled.

    Raises:
        UsageError: There is such a file.
    """
    if out.exists() and _record_of(out) is None:
        raise UsageError(
            "is not the text that was sampled there: it was changed, or is not ours",
            where=out,
            fix=f"use it with {option} {out}, or move it away",
        )


def check_decoder(config: Mapping[str, Any], option: str = CALIBRATION) -> None:
    """Refuse a model that cannot write text of its own, by its config.

    Raises:
        UsageError: An encoder-decoder.
    """
    if getattr(known_config(config), "is_encoder_decoder", False):
        raise UsageError(
            f"a {config.get('model_type')} model cannot generate text without a source",
            where=f"{option} generate",
            fix=f"give {option} FILE; for sources or recordings without targets add --targets generate",
        )


def check_writer(
    model: str | Path,
    *,
    window: int,
    device: torch.device,
    trust_remote_code: bool = False,
    option: str = CALIBRATION,
) -> tuple[int, int | None, int]:
    """Refuse a model that cannot write text here, before it is loaded.

    Args:
        model, window, trust_remote_code, option: As in `generate_text`.
        device: Where it would run.

    Returns:
        The id that a text starts with, the one that it ends with (or None), and how many texts fit at a time.

    Raises:
        UsageError: An encoder-decoder, a tokenizer without a start token, or model and cache do not fit the device.
    """
    config = load_config_json(model)
    check_decoder(config, option)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    end = tokenizer.eos_token_id  # also stands before a packed document, where there is no other start
    known = (bos_id(tokenizer), tokenizer.bos_token_id, end)
    start = next((found for found in known if found is not None), None)
    if start is None:
        raise UsageError(
            "the tokenizer has neither a BOS nor an end-of-text token to start a text with",
            where=f"{option} generate",
            fix=f"give {option} FILE",
        )
    return int(start), end, _rows(model, config, window, device, option)


def written_by(original: str, file: Path) -> dict[str, Any] | None:
    """The record of a file that the checkpoint of this fingerprint wrote and nobody has changed since; else None."""
    record = _record_of(file)
    if record is None or not isinstance(record.get("tokens"), int):
        return None
    return record if record.get("model") == original else None


def _record_of(file: Path) -> dict[str, Any] | None:
    """The record of a file that was sampled and that nobody has changed since; None for any other."""
    if not (file.exists() and _record_file(file).exists()):
        return None
    try:
        record = read_json(_record_file(file))
    except CheckpointError:
        return None
    with file.open("rb") as data:
        return record if hashlib.file_digest(data, "sha256").hexdigest() == record.get("sha256") else None


def _record_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _fingerprint(model: str | Path) -> str:
    """Which model writes a file, wherever it lies."""
    folder = local_path(model)
    return checkpoint_fingerprint(folder if folder.is_dir() else open_checkpoint(model).path)


def _rows(model: str | Path, config: dict[str, Any], window: int, device: torch.device, option: str) -> int:
    """How many sequences fit beside the weights.

    Raises:
        UsageError: Not even one.
    """
    free, weights = free_memory(device), weight_bytes(Path(model)) or 0
    most = CPU_ROWS if device.type == "cpu" else MOST_ROWS
    if free is None:
        return most
    rows = max_batch(config, memory_bytes=free, context=window, weight_bytes=weights, reserve=RESERVE)
    if rows < 1:
        needed = weights + kv_bytes(config, context=window)
        raise UsageError(
            f"the model and its KV cache need {needed / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free",
            where=f"{option} generate",
            fix=f"give {option} FILE with text that any engine sampled from the model",
        )
    return min(rows, most)


@dataclass(frozen=True)
class _Writer:
    """A model that samples, with what a text starts and ends with, and how long it is at most."""

    model: Any
    tokenizer: Any
    start: int
    end: int | None
    window: int

    def batch(self, rows: int, seed: int) -> dict[str, Any]:
        """`tokens` and `texts` of `rows` documents."""
        with seeded(seed, self.model.device):
            made = list(_sample(self.model, self.start, self.end, rows, self.window))
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in made]
        return {"tokens": sum(len(ids) + 1 for ids in made), "texts": texts}


def _sample(model: Any, start: int, end: int | None, rows: int, window: int) -> Iterator[list[int]]:
    """Ids of `rows` documents, without start and end."""
    from transformers import GenerationConfig

    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=window - 1,
        eos_token_id=end,
        pad_token_id=start if end is None else end,
        use_cache=True,
    )
    ids = torch.full((rows, 1), start, device=model.device)
    own = model.generation_config
    model.generation_config = (
        sampling  # what a config leaves out comes from the model's: penalties, truncation, beams
    )
    try:
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        model.generation_config = own
    for row in made[:, 1:].tolist():
        yield row[: row.index(end)] if end in row else row
