"""Pairs and recordings of a recipe, looked at before its first stage: a language forgotten in a later section is told now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..architectures import check_read
from ..checkpoints.hf_config import is_encoder_decoder
from ..config import Recipe
from ..config.option import declared
from ..config.pair_options import GENERATE, PairConfig
from ..config.recipe import Section
from ..data import PairOptions
from ..data.pairs import SPAN_CORRUPTED, is_audio, stock_type
from ..data.seq2seq import open_encoder
from ..data.sniffing import exists, parted
from ..errors import Mha2gqaError
from .builtin import PREFIX

CHECKED_PAIRS = 100  # of each section; its stage looks at more


def check_pairs(recipe: Recipe, source: str, config: Mapping[str, Any], network: bool = True) -> None:
    """Read some pairs of every section as its stage will, with its languages.

    Args:
        recipe: The recipe.
        source: The model's folder or Hub id; a config file is a model whose tokenizer is not there.
        config: Its raw config.
        network: Whether a model of the Hub may be asked for its tokenizer.

    Raises:
        UsageError, DataError: What the stage would fail on; the section is named.
    """
    if not is_encoder_decoder(config) or not (network or Path(source).is_dir()) or Path(source).is_file():
        return
    check_read(config, source)
    for name, section, data in _sections(recipe):
        options = section_options(section)
        local = tuple(x for x in data if exists(parted(x)[0]))
        spans = stock_type(config) in SPAN_CORRUPTED
        if spans and not (local and options.open(local, audio=False).fits()):
            continue
        try:
            options.check_used(generates=bool(getattr(section, "metrics", ())))
            encoder = open_encoder(source, options, recipe.trust_remote_code, config=config)
            if local:
                encoder.check(islice(options.open(local, is_audio(config)), CHECKED_PAIRS))
        except Mha2gqaError as error:
            raise type(error)(error.what, where=f"{name}: {error.where}", fix=error.fix) from error


def _sections(recipe: Recipe) -> Iterator[tuple[str, Section, tuple[str, ...]]]:
    """Sections that read data of files, with it."""
    found = [
        ("convert", recipe.convert, tuple(recipe.convert.calibration)),
        ("evaluate", recipe.evaluate, tuple(recipe.evaluate.data)),
    ]
    if recipe.uptrain is not None:
        found.append(("uptrain", recipe.uptrain, (*recipe.uptrain.data, *recipe.uptrain.eval_data)))
    for name, section, data in found:
        named = tuple(x for x in data if x != GENERATE and not x.startswith(PREFIX))
        if named:
            yield name, section, named


def section_options(section: Section) -> PairOptions:
    """How a section reads pairs."""
    return PairOptions.of(PairConfig(**{k: v for k, v in section.items() if k in declared(PairConfig)}))
