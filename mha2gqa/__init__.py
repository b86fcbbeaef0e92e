"""mha2gqa: turn multi-head-attention checkpoints into grouped-query ones."""

__version__ = "0.1.0"
