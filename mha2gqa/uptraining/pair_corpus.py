"""Training and held-out pairs of a run: read, kept apart, shuffled, encoded once; and how long the run is on them."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.atomic import write_json
from ..checkpoints.batch_log import BatchLog
from ..checkpoints.loading import load_model
from ..checkpoints.output import targets_file
from ..data import Pair, PairSource, held_out
from ..data.audio import Audio
from ..data.generation import kept_targets, targets_work
from ..data.seq2seq import Example, PairEncoder, encoder_positions
from ..distributed import is_rank_zero
from ..errors import DataError, UsageError
from ..progress import current
from .batches import Batch, BlockOrder, Mixture
from .budget import Budget, PairBudget, UptrainConfig, plan_pair_budget, wanted_tokens
from .corpus import SHUFFLED_BYTES, Corpus, blaming_eval_data
from .pair_checks import pairs_multiple, run_encoder
from .pair_store import Pairs, PairsInMemory, StoredPairs, content_key, is_written, write_pairs
from .prepare import PreparedRun
from .run_dir import check_sources


@dataclass(frozen=True)
class PairCollator:
    """Turns examples into what an encoder-decoder reads, padded, and labels.

    Args:
        encoder: Of the model.
    """

    encoder: PairEncoder
    counts_labels = True  # prompts and padding carry no loss

    def __call__(self, blocks: Sequence[Example], keys: Any = None) -> Batch:
        """Make the batch; `keys` are not used, nothing is drawn."""
        made = self.encoder.collate(blocks)
        return made.rows() | {"labels": made.labels}


class SplitPairs:
    """The pairs of a run, train and held-out side disjoint by their sources.

    Args:
        config: The run.
        encoder: Of the model.
    """

    def __init__(self, config: UptrainConfig, encoder: PairEncoder) -> None:
        self.config, self.encoder = config, encoder
        self.read: list[PairSource] = []
        self.known: set[str] = set()
        if config.eval_data is not None:
            self.known = {content_key(pair) for pair in self._open(config.eval_data, again=True)}

    def _open(self, data: Sequence[str], again: bool = False) -> PairSource:
        """A reading of some sources; one that another repeats is not reported."""
        source = self.encoder.options.open(tuple(data), self.encoder.audio)
        self.read += [] if again else [source]
        return source

    def _is_held_out(self, pair: Pair) -> bool:
        if self.config.eval_data is not None:
            return content_key(pair) in self.known
        return self.config.holdout > 0 and held_out(content_key(pair), self.config.holdout, 0)

    def train(self, data: Sequence[str]) -> Iterator[Pair]:
        """Training pairs of some sources, in an order given by the seed."""
        kept, size = [], 0
        for pair in self._open(data):
            if self._is_held_out(pair):
                continue
            kept.append(pair)
            size += _held_bytes(pair)
            if size >= SHUFFLED_BYTES:
                break
        if not kept:
            given = self.config.eval_data is not None
            raise DataError(
                "all its pairs are held out",
                where=", ".join(data),
                fix="give other eval_data" if given else "lower holdout",
            )
        random.Random(self.config.seed).shuffle(kept)
        yield from kept

    def held_out(self) -> Iterator[Pair]:
        """Held-out pairs in the order of the data."""
        if self.config.eval_data is not None:
            yield from self._open(self.config.eval_data)
        elif self.config.holdout > 0:
            yield from (pair for pair in self._open(self.config.data, again=True) if self._is_held_out(pair))

    def report(self) -> list[str]:
        """What the user should know of what has been read."""
        empty = sum(source.empty for source in self.read)
        left_out = [f"{empty:,} rows without a source or a target were left out"] if empty else []
        warnings = [text for source in self.read for text in source.warnings]
        return [*dict.fromkeys(warnings), *self.encoder.report(), *left_out]


def _held_bytes(pair: Pair) -> int:
    source = pair.source
    if isinstance(source, Audio):
        return len(source.data or b"") + (0 if source.samples is None else source.samples.nbytes) + 500
    return len(source) + len(pair.target or "") + 500


class TargetWriter:
    """The original, which writes targets: loaded when the first are to be written; those kept beside OUT are read.

    Args:
        run: Whose teacher it is.
        args: The run's TrainingArguments.
    """

    def __init__(self, run: PreparedRun, args: Any) -> None:
        self.run, self.args = run, args
        self._model: Any = None

    def __call__(self, encoder: PairEncoder, pairs: Iterable[Pair]) -> Generator[Pair, None, None]:
        """The pairs with targets that the original writes, where the run asks for that."""
        config, teacher = self.run.config, self.run.teacher
        if config.targets != "generate":
            yield from pairs
            return
        assert teacher is not None
        with BatchLog(targets_file(Path(config.out)), targets_work(encoder, teacher.fingerprint)) as log:
            yield from kept_targets(self._load, encoder, pairs, log)

    def _load(self) -> Any:
        """The original."""
        if self._model is None:
            assert self.run.teacher is not None
            current().stage("writing targets")
            name, consent = self.run.teacher.name, self.run.config.trust_remote_code
            self._model = load_model(name, device=self.args.device, trust_remote_code=consent)
        return self._model


def load_pair_corpus(run: PreparedRun, args: Any, tokenizer: Any, folder: Path) -> tuple[PreparedRun, Corpus]:
    """Read and encode the pairs of a run; what is encoded is kept in `folder` for a resumed run.

    Args:
        run: The run, whose budget is known only when the pairs are.
        args: Its TrainingArguments.
        tokenizer: Of the model.
        folder: The run directory.

    Returns:
        The run with its budget, and what it trains on.

    Raises:
        DataError: There are no training pairs, or one that the model cannot take.
        UsageError: The budget rounds to no step.
    """
    current().stage("reading pairs")
    config, encoder = run.config, run_encoder(run, tokenizer)
    encoder.reset()
    warnings = check_sources(config, folder, is_rank_zero(), encoder.audio)
    with blaming_eval_data(config.eval_data is not None):
        pairs = SplitPairs(config, encoder)
    writer = TargetWriter(run, args)
    scored = _held_out(config, encoder, pairs, writer, folder, warnings)
    wanted, _, _ = wanted_tokens(config, _original(run))
    groups = [config.data] if config.data_weights is None else [(path,) for path in config.data]
    shares = np.array(config.data_weights or (1.0,)) / sum(config.data_weights or (1.0,))
    sources: list[Pairs] = []
    for number, (data, share) in enumerate(zip(groups, shares, strict=True)):
        path, most = folder / f"train-{number}", int(np.ceil(wanted * share))
        if not is_written(path):
            with closing(writer(encoder, pairs.train(data))) as given:
                found = write_pairs(path, encoder, given, most)
            if not found:
                raise DataError("the model writes nothing for any of it", where=", ".join(data))
        sources.append(StoredPairs(path, encoder))
        have = int(sources[-1].targets.sum())
        if have < wanted * share:
            what = data[0] if len(data) == 1 else "the data"
            warnings.append(f"{what} has {have:,} target tokens: {wanted * share / have:.2f} passes over it")
    del writer
    budget, order = _ordered(run, sources, shares, PairCollator(encoder))
    unique = sum(int(rows.targets.sum()) for rows in sources)
    for text in (*warnings, *pairs.report()):
        run.warn(text)
    tokens = _tokens_by_step(order, sources, budget)
    return replace(run, budget=budget.counting(int(tokens[-1]))), Corpus(
        order, scored, unique, order.collate, tokens
    )


def corpus_in_memory(
    run: PreparedRun, pairs: PairsInMemory, held_out: PairsInMemory | None
) -> tuple[PreparedRun, Corpus]:
    """`load_pair_corpus` of pairs that are encoded already.

    Raises:
        UsageError: The budget rounds to no step.
    """
    budget, order = _ordered(run, [pairs], np.ones(1), PairCollator(pairs.encoder))
    tokens = _tokens_by_step(order, [pairs], budget)
    corpus = Corpus(order, held_out, int(pairs.targets.sum()), order.collate, tokens)
    return replace(run, budget=budget.counting(int(tokens[-1]))), corpus


def _original(run: PreparedRun) -> str:
    return str(run.manifest.get("source", run.config.model))


def _held_out(
    config: UptrainConfig,
    encoder: PairEncoder,
    pairs: SplitPairs,
    writer: TargetWriter,
    folder: Path,
    warnings: list[str],
) -> StoredPairs | None:
    """Held-out pairs up to `eval_tokens` target tokens; None where there are none."""
    path, none = folder / "held_out", folder / "held_out.none"
    if none.exists():
        return None
    if not is_written(path):
        with (
            blaming_eval_data(config.eval_data is not None),
            closing(writer(encoder, pairs.held_out())) as given,
        ):
            count = write_pairs(path, encoder, given, config.eval_tokens)
        if not count:
            if config.holdout > 0:
                warnings.append("no held-out evaluation during training: no pair is held out; give eval_data")
            write_json(none, {"why": "no pairs"})
            return None
    return StoredPairs(path, encoder)


def _ordered(
    run: PreparedRun, sources: Sequence[Pairs], shares: np.ndarray, collate: PairCollator
) -> tuple[Budget, BlockOrder]:
    """The budget that the lengths of the pairs give, and their order."""
    config = run.config
    means = np.array([rows.targets.mean() for rows in sources])
    drawn = (shares / means) / (shares / means).sum()  # shares are of target tokens
    lengths = PairBudget(
        1,
        float(drawn @ [_encoder_length(rows) for rows in sources]),
        float(drawn @ [rows.decoder_length for rows in sources]),
        float(drawn @ means),
    )
    budget = plan_pair_budget(config, lengths, multiple=pairs_multiple(config), name=_original(run))
    count = budget.steps * budget.blocks_per_step
    if len(sources) == 1:
        return budget, BlockOrder(sources[0], count, config.seed, collate)
    if (drawn * count < 1).any():
        raise UsageError(
            f"its share is less than one of the {count} pairs of the run",
            where=f"data_weights of {config.data[int(np.argmin(drawn))]}",
            fix="raise it, or leave that source out",
        )
    return budget, Mixture(sources, drawn.tolist(), count, config.seed, collate)


def _encoder_length(rows: Pairs) -> float:
    """Mean positions of the encoder."""
    if not rows.encoder.audio:
        return rows.source_length
    return float(encoder_positions(rows[0].encoder.shape, ids=False))


def _tokens_by_step(order: BlockOrder, sources: Sequence[Pairs], budget: Budget) -> np.ndarray:
    """Target tokens trained after each step, `[steps + 1]`."""
    found = np.zeros(len(order), np.int64)
    for item in range(len(order)):
        source, row = order.locate(item)
        found[item] = sources[source].targets[row]
    return np.concatenate([[0], found.reshape(budget.steps, -1).sum(1).cumsum()])
