"""Text to tokens: read documents, tokenise them, cut blocks, keep train and held-out text apart.

Everything streams: memory does not grow with the corpus (`token_blocks` holds the ids it returns).
"""

from .blocks import Block, Place, cut, cut_blocks, first_tokens, token_blocks
from .encoding import bos_id, encode_documents, eos_id, within
from .holdout import held_out
from .prefetch import Prefetcher
from .reading import Document, TextSource, paths_or_source, read_documents, read_records
from .spans import SpanCorruption, block_tokens, span_corruption

__all__ = [
    "Block",
    "Document",
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
    "span_corruption",
    "token_blocks",
    "within",
]
