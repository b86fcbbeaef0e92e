"""Text to tokens: read documents, tokenise them, cut blocks, keep train and held-out text apart.

Everything streams: memory does not grow with the corpus (`token_blocks` holds the ids it returns).
"""

from .blocks import (
    batches_of,
    bos_id,
    count_tokens,
    cut_blocks,
    encode_documents,
    eos_id,
    iterate_blocks,
    token_blocks,
    within,
)
from .reading import Document, read_documents, read_records
from .spans import SpanCorruption, block_tokens, span_corruption
from .streams import held_out, prefetch, split_documents

__all__ = [
    "Document",
    "SpanCorruption",
    "batches_of",
    "block_tokens",
    "bos_id",
    "count_tokens",
    "cut_blocks",
    "encode_documents",
    "eos_id",
    "held_out",
    "iterate_blocks",
    "prefetch",
    "read_documents",
    "read_records",
    "span_corruption",
    "split_documents",
    "token_blocks",
    "within",
]
