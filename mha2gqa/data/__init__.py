"""Text to tokens, pairs and recordings to examples: everything that reads, encodes, cuts or generates data.

`sniffing` asks what a name stands for, `opening` and `formats` read it, `reading` makes documents and `pairs` makes
pairs of it; `encoding`, `blocks`, `chat` and `spans` turn text into what a decoder or T5 learns from, `audio`,
`prompts`, `seq2seq` and `generation` pairs into what an encoder-decoder does. Everything streams: memory does not
grow with the corpus.
"""

from .blocks import Block, Place, cut, cut_blocks, first_tokens, require_blocks, token_blocks
from .encoding import bos_id, encode_documents, eos_id, within
from .holdout import held_out
from .pair_options import PairOptions
from .pairs import Pair, PairSource
from .prefetch import Prefetcher
from .reading import Document, TextSource, paths_or_source, read_documents, read_records
from .spans import SpanCorruption, block_tokens, span_corruption

__all__ = [
    "Block",
    "Document",
    "Pair",
    "PairOptions",
    "PairSource",
    "Place",
    "Prefetcher",
    "SpanCorruption",
    "TextSource",
    "block_tokens",
    "bos_id",
    "cut",
    "cut_blocks",
    "encode_documents",
    "eos_id",
    "first_tokens",
    "held_out",
    "paths_or_source",
    "read_documents",
    "read_records",
    "require_blocks",
    "span_corruption",
    "token_blocks",
    "within",
]
