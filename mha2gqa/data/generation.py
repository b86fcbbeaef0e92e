"""What an encoder-decoder writes: greedy or by beams, in batches, after the prompt that all targets have; loops again."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.batch_log import BatchLog
from ..checkpoints.loading import quiet
from ..errors import DataError, reason
from ..progress import current
from .audio import Audio
from .pairs import Pair
from .seq2seq import Example, PairEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 32  # examples generated at once
NEW_TOKENS = 256  # at most, where the decoder has no limit of its own
UNSET_LENGTH = 20  # `max_length` that transformers 4 writes where nobody set one
# A search that gives one text a source, and depends on nothing but the model: what its generation config may say besides
# would sample, time out, give several texts, or search in a way that needs other code.
PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
} | dict.fromkeys(
    (
        "assistant_early_exit", "constraints", "dola_layers", "force_words_ids", "forced_decoder_ids",
        "guidance_scale", "max_length", "max_time", "penalty_alpha", "prompt_lookup_num_tokens",
    )
)  # fmt: skip
LOOP = 2.4  # Whisper's `compression_ratio_threshold`, beyond which it decodes again with a higher temperature


def generate_ids(
    model: PreTrainedModel,
    encoder: PairEncoder,
    examples: Iterable[Example],
    *,
    batch_size: int = BATCH,
    max_new_tokens: int | None = None,
) -> Iterator[list[int]]:
    """What the model writes for each example: ids after the prompt, with the end if it came to one.

    The search of transformers with the model's own generation config (suppressed tokens, bad words, lengths), but
    without sampling, and with the prompt of `encoder`, so that all models of a comparison write the same kind of text. How
    wide the search is, and at which temperatures a text that repeats itself is sampled anew, the options of `encoder` say.

    Args:
        model: In eval mode, on its device.
        encoder: Of its pairs.
        examples: Only what their encoder reads is used.
        batch_size: Examples at once.
        max_new_tokens: At most so many ids; None for what its generation config and the decoder take, 256 where
            neither limits it.
    """
    limit = min(n for n in (max_new_tokens, _room(encoder)) if n is not None)
    waiting = iter(examples)
    while batch := list(islice(waiting, batch_size)):
        written = _generate(model, encoder, batch, limit)
        for seed, temperature in enumerate(encoder.options.retry_temperatures):
            again = [i for i, ids in enumerate(written) if repeats(decode(encoder, ids))]
            if not again:
                break
            other = _generate(model, encoder, [batch[i] for i in again], limit, _Sampled(temperature, seed))
            for i, ids in zip(again, other, strict=True):
                written[i] = ids
        yield from written


def _room(encoder: PairEncoder) -> int:
    """How many ids may be written after the prompt."""
    own = encoder.generation
    whole = (encoder.target_limit, own.get("max_length") if own.get("max_length") != UNSET_LENGTH else None)
    limits = [n - len(encoder.prompt) for n in whole if n] + [n for n in (own.get("max_new_tokens"),) if n]
    return max(1, min(limits, default=NEW_TOKENS))


def repeats(text: str) -> bool:
    """Whether a text repeats itself, by the ratio that Whisper judges its own transcripts by."""
    data = text.encode(errors="replace")
    return len(data) > LOOP * len(zlib.compress(data))


class _Sampled:
    """Logits whose greatest is a sample at a temperature (Gumbel's trick).

    All rows of a step get the same random numbers, so that what a row samples depends neither on the rows beside it nor
    on the device, and a model and its conversion sample alike.

    Args:
        temperature: Of the softmax.
        seed: Of the random numbers.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[B, V]` of a step, which are logits, with noise `[V]`."""
        noise = torch.empty(scores.shape[-1], dtype=torch.float64).exponential_(generator=self.random).log_()
        return scores / self.temperature - noise.to(scores.device, scores.dtype)


@torch.inference_mode()
def _generate(
    model: Any,
    encoder: PairEncoder,
    examples: Sequence[Example],
    limit: int,
    sampled: _Sampled | None = None,
) -> list[list[int]]:
    """The ids that are written by a search, or sampled: the same ones every time."""
    from transformers import GenerationMixin, LogitsProcessorList

    rows = encoder.collate(examples).rows()
    device, dtype = model.device, model.dtype
    inputs = {
        name: x.to(device, dtype if x.is_floating_point() else None)
        for name, x in rows.items()
        if not name.startswith("decoder_")
    }
    prompt = torch.tensor([encoder.prompt] * len(examples), device=device)
    plain = {name: value for name, value in PLAIN.items() if hasattr(model.generation_config, name)}
    try:
        # Whisper's own `generate` would choose language and prompt anew and cut long recordings in pieces.
        with quiet():
            ids = GenerationMixin.generate(
                model,
                **inputs,
                **plain,
                decoder_input_ids=prompt,
                decoder_start_token_id=encoder.prompt[0],
                num_beams=1 if sampled else encoder.options.beams,
                logits_processor=LogitsProcessorList([sampled] if sampled else []),
                max_new_tokens=limit,
                tokenizer=encoder.tokenizer,  # for stop strings
            )
    except Exception as error:  # of the search or the model's code
        raise DataError(f"nothing can be generated ({reason(error)})", where=encoder.name) from error
    end, pad = encoder.end, encoder.pad
    return [_until_end(row[prompt.shape[1] :].tolist(), end, pad) for row in ids]


def _until_end(ids: list[int], end: int | None, pad: int) -> list[int]:
    if end is not None and end in ids:
        return ids[: ids.index(end) + 1]
    while ids and ids[-1] == pad:
        ids.pop()
    return ids


def with_targets(
    model: PreTrainedModel,
    encoder: PairEncoder,
    pairs: Iterable[Pair],
    *,
    batch_size: int = BATCH,
) -> Iterator[Pair]:
    """The pairs with targets that the model writes; those it has nothing to say to are left out.

    Args:
        model: The original, in eval mode.
        encoder: Of its pairs.
        pairs: Sources; targets they have are replaced.
        batch_size: As in `generate_ids`.
    """
    return kept_targets(lambda: model, encoder, pairs, None, batch_size=batch_size)


def targets_work(encoder: PairEncoder, model: str) -> dict[str, Any]:
    """What decides the targets of a source, for the file that they are kept in.

    Args:
        encoder: Of the model's pairs.
        model: Its fingerprint.
    """
    generation = {k: v for k, v in encoder.generation.items() if k != "transformers_version"}
    return {
        "model": model,
        "pairs": asdict(encoder.options),
        "prompt": list(encoder.prompt),
        "generation": _digest(json.dumps(generation, sort_keys=True, default=str)),
    }


def kept_targets(
    load: Callable[[], PreTrainedModel],
    encoder: PairEncoder,
    pairs: Iterable[Pair],
    log: BatchLog | None,
    *,
    batch_size: int = BATCH,
) -> Iterator[Pair]:
    """`with_targets`, but what was written for the same batch of sources before is taken from a file.

    Args:
        load: Gives the original, in eval mode; called when the first target is to be written.
        encoder, pairs, batch_size: As in `with_targets`.
        log: A file for `targets_work`; None keeps nothing.
    """
    waiting, done, model = iter(pairs), 0, None
    known = {written["sources"]: number for number, written in enumerate(log or ())}
    while batch := list(islice(waiting, batch_size)):
        sources = "" if log is None else _digest(*map(_source, batch))
        if log is not None and sources in known:
            written = log[known[sources]]["ids"]
        else:
            model = model or load()
            written = _written(model, encoder, batch)
            if log is not None:
                log.append({"sources": sources, "ids": written})
        current().advance(done := done + len(batch))
        for pair, ids in zip(batch, written, strict=True):
            text = decode(encoder, ids)
            if text.strip():
                yield replace(pair, target=text, target_ids=tuple(ids))
            else:
                encoder.unanswered += 1


def _written(model: PreTrainedModel, encoder: PairEncoder, batch: Sequence[Pair]) -> list[list[int]]:
    """What the model writes for sources, which have been looked at and will be encoded again."""
    with encoder.uncounted():
        examples = [encoder.encode(replace(pair, target="", target_ids=None)) for pair in batch]
    return list(generate_ids(model, encoder, examples, batch_size=len(batch)))


def _source(pair: Pair) -> str:
    """What tells the source of a pair from others."""
    return f"{pair.source.digest()} {pair.source.rate}" if isinstance(pair.source, Audio) else pair.source


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def decode(encoder: PairEncoder, ids: Sequence[int]) -> str:
    """The text of generated ids."""
    return str(encoder.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
