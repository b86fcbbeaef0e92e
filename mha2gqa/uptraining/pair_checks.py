"""Checks of the options of a run on pairs, before a weight is loaded or a target generated."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from ..checkpoints.hf_config import is_encoder_decoder
from ..checkpoints.loading import load_tokenizer
from ..config.option import declared
from ..config.pair_options import PairConfig
from ..data import PairOptions
from ..data.seq2seq import PairEncoder, is_audio, open_encoder
from ..data.spans import sentinel_ids
from ..distributed import world_size
from ..errors import UsageError
from .budget import PairBudget, UptrainConfig

if TYPE_CHECKING:
    from .prepare import PreparedRun

PAIRS: Final = "pairs"
CHECKED_PAIRS = 10_000  # looked at beforehand, at most
UNKNOWN_PAIRS = PairBudget(1, 1.0, 1.0, 1.0)  # lengths, until the data has been read
# Options about text that pairs have no use for, and what stands in their place.
TEXT_ONLY = {
    "window": "pairs have lengths of their own",
    "text_column": "name the columns with source_column and target_column",
    "streaming": "leave it out",
    "assistant_only_loss": "leave it out",
    "teacher_cache": "leave it out",
}


def reads_pairs(config: UptrainConfig, raw: Mapping[str, Any]) -> bool:
    """Whether an encoder-decoder trains on pairs: it is a speech model, the data has their columns, or it knows nothing else.

    Args:
        config: The run.
        raw: The model's raw config.
    """
    if is_audio(raw) or not sentinel_ids(load_tokenizer(config.model, config.trust_remote_code)):
        return True
    return PairOptions.of(config).open(config.data, audio=False).fits()


def check_data_options(config: UptrainConfig, objective: str) -> None:
    """Refuse options about text for pairs, and about pairs for text: none is accepted and ignored.

    Raises:
        UsageError: Such an option is given.
    """
    own, defaults = declared(PairConfig), declared(UptrainConfig)
    unused = TEXT_ONLY if objective == PAIRS else dict.fromkeys(own, "leave it out")
    for name, fix in unused.items():
        value = getattr(config, name)
        if value != defaults[name].default:
            said = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(
                f"has no meaning for objective {objective}", where=f"{name} {said}".strip(), fix=fix
            )


def check_sentinels(config: UptrainConfig) -> None:
    """Refuse corrupted spans for a model that has no tokens for them.

    Raises:
        UsageError: Its tokenizer has no sentinels.
    """
    if not sentinel_ids(load_tokenizer(config.model, config.trust_remote_code)):
        raise UsageError(
            f"the tokenizer of {config.model} has no sentinels",
            where="objective span-corruption",
            fix="train on pairs: objective pairs",
        )


def pairs_multiple(config: UptrainConfig) -> int:
    """Of what the pairs of a step are a multiple: processes times the micro-batch that is asked for."""
    given = config.training_args.get("per_device_train_batch_size")
    return world_size() * (given if isinstance(given, int) and given > 0 else 1)


def run_encoder(run: PreparedRun, tokenizer: Any = None) -> PairEncoder:
    """The encoder of a run's pairs."""
    assert run.source is not None
    return open_encoder(
        run.source.path,
        PairOptions.of(run.config),
        run.config.trust_remote_code,
        tokenizer,
        run.source.config,
    )


def check_pairs(run: PreparedRun) -> None:
    """Look at the data as far as that costs little, and at who writes the targets.

    Raises:
        UsageError: Languages that must be named, targets that nobody writes.
        DataError: No pairs, or one that the model cannot take.
    """
    config = run.config
    assert run.source is not None and is_encoder_decoder(run.source.config)
    if config.targets == "generate" and run.teacher is None:
        raise UsageError(
            "requires the original, which generates them",
            where="targets generate",
            fix="name it with teacher; ce_weight 1 trains on what it writes alone",
        )
    encoder = run_encoder(run)
    encoder.options.check_used()
    for data in (config.data, config.eval_data):
        if data is not None:
            pairs = encoder.options.open(data, encoder.audio)
            encoder.check(islice(pairs, CHECKED_PAIRS))
