"""Generated text of several models side by side: word errors, BLEU, chrF, and how often it is the original's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.generation import repeats
from ..errors import UsageError
from .bootstrap import RESAMPLES, PairedTest, paired_test
from .evaluate_result import GeneratedText, Generation

if TYPE_CHECKING:
    from ..data.seq2seq import PairEncoder

METRICS = ("wer", "cer", "bleu", "chrf", "exact_match")
AUTO, EXACT = "auto", "exact_match"
LIBRARIES = {"wer": "jiwer", "cer": "jiwer", "bleu": "sacrebleu", "chrf": "sacrebleu"}
SHOWN = 5  # texts kept for a look
BLEU_TOKENIZERS = {"zh": "zh", "zho": "zh", "ja": "char", "jpn": "char", "th": "char", "tha": "char"}


def named_metrics(names: Sequence[str], audio: bool) -> tuple[str, ...]:
    """The metrics asked for, `auto` resolved: word errors for recordings, BLEU and chrF for text."""
    usual = ("wer", "cer", "exact_match") if audio else ("bleu", "chrf", "exact_match")
    return tuple(dict.fromkeys(m for name in names for m in (usual if name == AUTO else (name,))))


def choose_metrics(names: Sequence[str], audio: bool) -> tuple[str, ...]:
    """`named_metrics`, as far as they can be measured.

    Raises:
        UsageError: An unknown name, or a library that is not installed.
    """
    chosen = named_metrics(names, audio)
    for name in chosen:
        if name not in METRICS:
            raise UsageError(f"must be among {', '.join((AUTO, *METRICS))}", where=f"--metrics {name}")
        if name in LIBRARIES:
            _library(LIBRARIES[name], name)
    return chosen


def _library(name: str, metric: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed", where=f"--metrics {metric}", fix="run pip install 'mha2gqa[metrics]'"
        ) from error


def normaliser(encoder: PairEncoder) -> Callable[[str], str]:
    """Whisper's own normaliser of transcripts: the English one for English, else the basic one."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    options = encoder.options
    language = (options.source_language or options.target_language or "en").lower()
    if language not in ("en", "english") or options.task == "translate":
        return BasicTextNormalizer()
    spelling = getattr(encoder.tokenizer, "english_spelling_normalizer", None)
    return EnglishTextNormalizer(spelling or {})


@dataclass(frozen=True)
class Texts:
    """What all models were asked, and how it is compared.

    Args:
        places, references: Of each example.
        metrics: Which are computed.
        normalise: Applied to transcripts before words are compared.
        tokenizer: Of BLEU.
        retry_temperatures: At which texts that repeat themselves were written again.
    """

    places: Sequence[str]
    references: Sequence[str]
    metrics: Sequence[str]
    normalise: Callable[[str], str]
    tokenizer: str = "13a"
    retry_temperatures: tuple[float, ...] = ()


def bleu_tokenizer(language: str | None) -> str:
    """The tokenizer of BLEU for a target language; characters where words are not spaced."""
    return BLEU_TOKENIZERS.get(re.split(r"[-_]", (language or "").lower())[0], "13a")


def compare_texts(
    texts: Texts, written: Sequence[str], original: Sequence[str] | None, against: str, seed: int = 0
) -> Generation:
    """The metrics of one model's texts.

    Args:
        texts: The references.
        written: Of the model.
        original: Of the model it is compared with, or None.
        against: That model's name.
        seed: Of the bootstrap.
    """
    found: dict[str, float] = {}
    paired: dict[str, PairedTest] = {}
    for name in ("wer", "cer"):
        if name in texts.metrics:
            errors, lengths = _errors(texts, written, name)
            found[name] = 100 * float(errors.sum() / max(1.0, lengths.sum()))
            if original is not None:
                other, _ = _errors(texts, original, name)
                test = paired_test(100 * errors, 100 * other, lengths, against=against, seed=seed)
                paired |= {name: test} if test else {}
                sound = ~(loops(written) | loops(original))
                if name == "wer" and not sound.all():
                    parts = (100 * errors[sound], 100 * other[sound], lengths[sound])
                    test = paired_test(*parts, against=against, seed=seed)
                    paired |= {"wer_without_loops": test} if test else {}
    if "bleu" in texts.metrics:
        counts = _bleu_counts(texts, written)
        found["bleu"] = _bleu(counts.sum(axis=0))
        if original is not None and len(written) > 1:
            paired["bleu"] = _paired_corpus(_bleu, counts, _bleu_counts(texts, original), against, seed)
    if "chrf" in texts.metrics:
        counts = _chrf_counts(texts, written)
        found["chrf"] = _chrf(counts.sum(axis=0))
        if original is not None and len(written) > 1:
            paired["chrf"] = _paired_corpus(_chrf, counts, _chrf_counts(texts, original), against, seed)
    if "exact_match" in texts.metrics and original is not None:
        found["exact_match"] = 100 * float(np.mean([a == b for a, b in zip(written, original, strict=True)]))
    rows = zip(texts.places, texts.references, written, strict=True)
    shown = [GeneratedText(*row) for row, _ in zip(rows, range(SHOWN), strict=False)]
    looped = int(loops(written).sum()) if "wer" in texts.metrics else None
    tries = texts.retry_temperatures
    return Generation(
        len(written), **found, looped=looped, paired=paired, shown=shown, retry_temperatures=tries
    )


def loops(written: Sequence[str]) -> np.ndarray:
    """Which texts repeat themselves, bool `[n]`."""
    return np.array([repeats(text) for text in written], dtype=bool)


# --- word errors -----------------------------------------------------------------------------------------


def _errors(texts: Texts, written: Sequence[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Errors and reference length of each example, in words or characters."""
    jiwer = _library("jiwer", name)
    process = jiwer.process_words if name == "wer" else jiwer.process_characters
    errors, lengths = np.zeros(len(written)), np.zeros(len(written))
    for i, (reference, text) in enumerate(zip(texts.references, written, strict=True)):
        right, said = texts.normalise(reference).strip(), texts.normalise(text).strip()
        if not right:  # a transcript of signs only: whatever is said is too much
            errors[i] = len(said.split()) if name == "wer" else len(said)
            continue
        found = process(right, said)
        errors[i] = found.substitutions + found.deletions + found.insertions
        lengths[i] = found.substitutions + found.deletions + found.hits
    return errors, lengths


# --- BLEU and chrF ---------------------------------------------------------------------------------------


def _bleu_counts(texts: Texts, written: Sequence[str]) -> np.ndarray:
    """What BLEU is made of, of each example: matches and totals of 1- to 4-grams, both lengths: `[n, 10]`."""
    bleu = _library("sacrebleu", "bleu").BLEU(tokenize=texts.tokenizer, force=True)
    rows = []
    for text, reference in zip(written, texts.references, strict=True):
        score = bleu.corpus_score([text], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.array(rows, dtype=np.float64)


def _bleu(counts: np.ndarray) -> float:
    """BLEU of summed counts `[10]`."""
    compute = _library("sacrebleu", "bleu").BLEU.compute_bleu
    whole = [int(x) for x in counts]
    return float(compute(whole[:4], whole[4:8], whole[8], whole[9], smooth_method="exp").score)


def _chrf_counts(texts: Texts, written: Sequence[str]) -> np.ndarray:
    """What chrF is made of, of each example: n-grams of it, of its reference and of both, `[n, 18]`."""
    chrf = _library("sacrebleu", "chrf").CHRF()
    return np.array(
        chrf._extract_corpus_statistics(list(written), [list(texts.references)]), dtype=np.float64
    ).reshape(len(written), -1)


def _chrf(counts: np.ndarray) -> float:
    """chrF of summed counts `[18]`."""
    chrf = _library("sacrebleu", "chrf").CHRF()
    return float(chrf._compute_score_from_stats([int(x) for x in counts]).score)


def _paired_corpus(
    score: Callable[[np.ndarray], float], own: np.ndarray, other: np.ndarray, against: str, seed: int
) -> PairedTest:
    """Paired bootstrap of the difference of a score of summed counts, examples resampled (Koehn 2004)."""
    n = len(own)
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)  # [R, n]
    differences = np.array([score(a) - score(b) for a, b in zip(drawn @ own, drawn @ other, strict=True)])
    low, high = np.quantile(differences, [0.025, 0.975])
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return PairedTest(
        against,
        score(own.sum(axis=0)) - score(other.sum(axis=0)),
        float(differences.std(ddof=1)),
        float(low),
        float(high),
        min(1.0, 2 * (1 + int(beyond)) / (1 + RESAMPLES)),
        n,
    )
