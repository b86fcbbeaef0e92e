"""What one sequence of an encoder-decoder caches: the decoder's own keys and values, and the encoder's states'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .numbers import human_bytes

Cache = Mapping[str, int]


def cache_sentences(caches: Sequence[tuple[str, Cache]]) -> list[str]:
    """One sentence for models side by side, by the lengths they were built for; nothing without any.

    Args:
        caches: Name, and `self`, `cross`, `context`, `source` of `kv_cache.sequence_cache`.
    """
    lengths: dict[tuple[int, int], dict[str, str]] = {}  # text -> the first model that it is true of
    for name, cache in caches:
        lengths.setdefault((cache["context"], cache["source"]), {}).setdefault(cache_text(cache), name)
    return [
        f"Cache of a sequence ({context:,} target tokens, {source:,} encoder positions), self + cross: "
        + "; ".join(f"{name} {text}" for text, name in texts.items())
        for (context, source), texts in lengths.items()
    ]


def cache_text(cache: Cache) -> str:
    """Both parts and their sum."""
    own, cross = cache["self"], cache["cross"]
    return f"{human_bytes(own)} + {human_bytes(cross)} = {human_bytes(own + cross)}"
