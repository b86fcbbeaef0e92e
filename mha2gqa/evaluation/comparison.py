"""`evaluate`: several models, the same tokens, every figure with the protocol's name beside it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from ..checkpoints.loading import load_model
from ..config.keywords import EvaluateKeywords
from ..config.option import build
from ..config.signature import takes_options
from ..data import Pair, PairSource, Prefetcher
from ..data.generation import decode, generate_ids, with_targets
from ..errors import DataError
from ..progress import Callback, Progress, current, reporting
from .agreement import attention_error
from .batching import Batch, make_batches
from .entries import EvalModel
from .evaluate_result import EvaluateConfig, EvaluateResult, LoadedModel, ModelRef
from .lm_eval import run_tasks
from .metrics import Sources, summarise
from .protocols import PROTOCOLS, Settings, Skipped, Window
from .scoring import Scorer, TokenScores, score_batches
from .setup import ResolvedConfig, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATING = "generating with "
SCORING = "scoring "  # and the model's name: a stage
ATTENTION_BATCHES = 2  # batches on which attention outputs are compared


@takes_options(EvaluateConfig, without=["agreement"])
def evaluate(
    models: ModelRef | Sequence[ModelRef],
    data: Any,
    *,
    progress: Progress | Callable[[str, int], None] | None = None,
    **options: Unpack[EvaluateKeywords],
) -> EvaluateResult:
    """Score models on the same held-out text.

    Args:
        models: One or several of folder, Hub id, `LoadedModel`; the first is the one to compare with.
        data: Paths, data sets, texts or token ids, as `TextSource` takes them.
        progress: Whom to report to. In an older form a function, called with a model's name and its tokens scored.
        **options: See `EvaluateConfig`.

    Returns:
        Loss, perplexity and bits per byte of each model, with intervals, paired tests and KV bytes.

    Raises:
        UsageError: Options that cannot be met, such as a window longer than a model's context.
        DataError: The text cannot be read or is too short to score anything.
        CheckpointError: A model or tokenizer cannot be loaded.

    Example:
        >>> result = evaluate(["original", "converted"], "valid.jsonl", protocol="blocks", window=512)
        >>> [(m.path, m.loss) for m in result.models]
    """
    config = build(EvaluateConfig, "evaluate", {"models": models, "data": data} | options)  # type: ignore[operator]
    with reporting(_listener(progress)):
        run = _Run(prepare(config))
        run.score_all()
        return summarise(run.setup, run.sources, run.documents, run.skipped)


def _listener(progress: Progress | Callable[[str, int], None] | None) -> Progress | None:
    """Whom to report to, also in the older form of a function."""
    if progress is None or isinstance(progress, Progress):
        return progress

    def changed(stage: str, done: int, total: int) -> None:
        if done:
            progress(stage.removeprefix(SCORING), done)

    return Callback(changed)


class _Run:
    """The passes over the text of one call of `evaluate`."""

    def __init__(self, setup: ResolvedConfig) -> None:
        self.setup, self.progress = setup, current()
        self.sources = Sources()
        self.documents = 0
        self.skipped = Skipped()

    def score_all(self) -> None:
        """Score every model; with a reference, each beside it."""
        reference = self.setup.reference
        others = [e for e in self.setup.entries if e is not reference]
        if self.setup.config.targets == "generate" and isinstance(self.setup.text, PairSource):
            self._write_targets(self.setup.entries[0], self.setup.text)
        self.progress.announce(*(f"{SCORING}{e.name}" for e in others or self.setup.entries))
        if reference is None or not others:
            for entry in self.setup.entries:
                self._score(entry)
            return
        with self._opened(reference) as original:
            self._run_tasks(reference, original)
            self._generate(reference, original)
            head = Scorer(original)
            for entry in others:
                self._score(entry, reference, head)

    def _score(
        self, entry: EvalModel, reference: EvalModel | None = None, other: Scorer | None = None
    ) -> None:
        """One pass over the text; fills the sums of `entry`, and of `reference` if it has none yet."""
        self.progress.stage(f"{SCORING}{entry.name}", self._expected(), "tokens")
        with self._opened(entry) as model:
            self._run_tasks(entry, model)
            self._generate(entry, model)
            head = Scorer(model)
            with Prefetcher(self._batches(entry, head.device)) as batches:
                first = self._add_up(entry, score_batches(head, batches, other), reference)
            if entry.sums.tokens == 0:
                raise DataError(
                    "nothing can be scored: every document has at most one token",
                    where="--data",
                    fix="give longer text",
                )
            if reference is not None and other is not None:
                entry.attention_error = attention_error(head, other, first)
                if not reference.sums.sha256:
                    reference.sums.sha256 = entry.sums.sha256
                    reference.sums.seconds = entry.sums.seconds

    def _expected(self) -> int | None:
        """How many tokens a pass will score, where a model with the same tokenizer has been scored."""
        known = [e.sums.tokens for e in self.setup.entries if e.sums.sha256]
        return known[0] if known and self.setup.same_tokenizer else None

    def _add_up(
        self, entry: EvalModel, scored: Iterator[tuple[Batch, TokenScores]], reference: EvalModel | None
    ) -> list[Batch]:
        """Fill the sums; the first few batches, for a closer look."""
        began = time.perf_counter()
        fill = reference is not None and not reference.sums.sha256
        first: list[Batch] = []
        for batch, scores in scored:
            entry.sums.add(batch, scores.nll.numpy())
            if reference is not None and scores.reference_nll is not None:
                entry.sums.add_comparison(batch, scores)
                if fill:
                    reference.sums.add(batch, scores.reference_nll.numpy())
                if len(first) < ATTENTION_BATCHES:
                    first.append(batch)
            self.progress.advance(entry.sums.tokens)
        entry.sums.seconds = time.perf_counter() - began
        return first

    def _run_tasks(self, entry: EvalModel, model: PreTrainedModel) -> None:
        config = self.setup.config
        if config.tasks:
            size, limit = config.batch_size, config.task_limit
            entry.tasks = run_tasks(model, entry.tokenizer, config.tasks, batch_size=size, limit=limit)

    def _write_targets(self, entry: EvalModel, source: PairSource) -> None:
        """Let the first model write the targets of all pairs."""
        assert entry.encoder is not None
        self.progress.stage(f"writing targets with {entry.name}", None, "pairs")
        with self._opened(entry) as model:
            source.keep(with_targets(model, entry.encoder, source))
        self.setup.warnings += entry.encoder.report()  # what was left out; scoring counts anew

    def _generate(self, entry: EvalModel, model: PreTrainedModel) -> None:
        """Keep what the model writes for each pair."""
        encoder = entry.encoder
        if encoder is None or not self.setup.metrics:
            return
        self.progress.stage(f"{GENERATING}{entry.name}", None, "pairs")
        examples = (encoder.encode(pair) for pair in self.setup.text if isinstance(pair, Pair))
        for ids in generate_ids(model, encoder, examples):
            entry.texts.append(decode(encoder, ids))
            self.progress.advance(len(entry.texts))

    @contextlib.contextmanager
    def _opened(self, entry: EvalModel) -> Iterator[PreTrainedModel]:
        """The model in eval mode; one from a folder is loaded, one in memory left as found."""
        if isinstance(entry.subject, LoadedModel):
            model = entry.subject.model
            entry.parameters = model.num_parameters()
            training = model.training
            model.eval()
            try:
                yield model
            finally:
                model.train(training)
            return
        gc.collect()  # the model before this one is out of scope by now
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()
        model = load_model(
            entry.subject,
            dtype=self.setup.dtype,
            device=self.setup.device,
            trust_remote_code=self.setup.config.trust_remote_code,
        )
        entry.parameters = model.num_parameters()
        yield model

    def _batches(self, entry: EvalModel, device: torch.device) -> Iterator[Batch]:
        """The batches of a pass, ready for the way to `device`."""
        config = self.setup.config
        for batch in make_batches(self._windows(entry), config.batch_size, self.setup.window):
            yield batch.pinned() if device.type == "cuda" else batch

    def _windows(self, entry: EvalModel) -> Iterator[Window]:
        """The protocol's windows; hashes them, and notes sources once."""
        setup = self.setup
        self.skipped = Skipped()
        settings = Settings(
            setup.window,
            setup.stride,
            entry.bos,
            setup.config.max_tokens,
            entry.config,
            self.skipped,
            entry.encoder,
        )
        if entry.encoder is not None:
            entry.encoder.reset()
        protocol = PROTOCOLS[setup.config.protocol]
        note_sources = not self.sources.files
        digest = hashlib.sha256()
        for item in protocol(entry.tokenizer, setup.read(), settings):
            self.documents = item.documents
            digest.update(struct.pack("<qq", len(item.ids), item.first))
            digest.update(item.ids.astype("<i4", copy=False).data)
            if item.encoder is not None:
                read = (
                    item.encoder if item.encoder.dtype.kind == "f" else item.encoder.astype("<i4", copy=False)
                )
                digest.update(np.ascontiguousarray(read).data)
            if note_sources:
                self.sources.add(item.unit, item.source)
            yield item
        if setup.config.max_tokens is None:
            self.skipped.empty = setup.text.empty  # those after the last document as well
        entry.sums.sha256 = digest.hexdigest()
