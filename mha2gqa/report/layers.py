"""What a conversion says of every attention module: errors in the order of the stages, groups of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .content import Column, Row, Table, in_order
from .numbers import finite, fixed, number

MERGE_ERRORS = {"relative_error_neighbours": "neighbours as groups", "relative_error": "groups in use"}
STAGE_ERRORS = {
    "error_merged": "merged",
    "error_refitted": "refitted",
    "error_fitted": "fitted",
}
HEADINGS = {
    "relative_error_neighbours": "error as neighbours",
    "relative_error": "error",
    "norm_ratio k": "key norm",
    "norm_ratio v": "value norm",
    **STAGE_ERRORS,
}
WHOLE = ("layer", "seconds")  # numbers that are not figures of the merge


def layers_table(layers: Sequence[Row], groups: bool = False) -> Table:
    """Figures of every attention module.

    Args:
        layers: `convert`'s `layers[]`.
        groups: List the heads of each group; else say whether they are neighbours.

    Returns:
        One row for each module; columns in the order in which a conversion makes the figures.
    """
    figures = [_figures(layer) for layer in layers]
    names = in_order(dict.fromkeys(name for found in figures for name in found), tuple(HEADINGS))
    if all(found.get(name, 1.0) == 1.0 for found in figures for name in ("norm_ratio k", "norm_ratio v")):
        names = [name for name in names if not name.startswith("norm_ratio")]  # joint keeps them by design
    columns: list[Column] = [("layer", "<")]
    columns += [(HEADINGS.get(name, name.replace("_", " ")), ">") for name in names]
    columns += [("groups", "<")] if any(layer.get("grouping") for layer in layers) else []
    rows = []
    for i, (layer, found) in enumerate(zip(layers, figures, strict=True)):
        cells = [label_of(layer, i), *(fixed(found.get(name), 4) for name in names)]
        rows.append([*cells, _groups(layer, groups)][: len(columns)])
    return Table(columns, rows)


def current(layer: Row) -> Row:
    """A module's entry with the relative errors that older files call residuals under their name of today."""
    named = {
        key.replace("residual", "relative_error"): value for key, value in layer.items() if "residual" in key
    }
    return named | {key: value for key, value in layer.items() if "residual" not in key}


def _figures(layer: Row) -> dict[str, float]:
    """Every figure of a module, those of a nested mapping by `name part`."""
    found: dict[str, float] = {}
    for name, value in current(layer).items():
        parts = value.items() if isinstance(value, Mapping) else (("", value),)
        for part, inner in parts:
            if name not in WHOLE and not isinstance(inner, int) and (figure := number(inner)) is not None:
                found[f"{name} {part}".strip()] = figure
    return found


def label_of(layer: Row, index: int) -> str:
    """Number of a layer, and the kind of attention where it is another than self-attention."""
    kind = layer.get("kind", "self")
    return f"{layer.get('layer', index)}{'' if kind == 'self' else f' {kind}'}"


def _groups(layer: Row, listed: bool) -> str:
    if not listed:
        return "regrouped" if layer.get("regrouped") else "neighbours"
    return " ".join("{" + " ".join(map(str, group)) + "}" for group in layer.get("grouping") or ())


def layer_series(
    layers: Sequence[Row], names: Mapping[str, str] = MERGE_ERRORS
) -> dict[str, list[tuple[float, float]]]:
    """Figures of `layers[]` as `(layer, value)` points.

    Args:
        layers: `convert`'s `layers[]`.
        names: Key of a figure -> what to call it.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for key, name in names.items():
        points = [
            (float(layer.get("layer", i)), value)
            for i, layer in enumerate(layers)
            if (value := finite(current(layer).get(key))) is not None
        ]
        if points:
            series[name] = points
    return series


def layer_groupings(layers: Sequence[Row]) -> list[tuple[str, Sequence[Sequence[int]]]]:
    """The grouping of each attention module, labelled by its layer."""
    return [
        (label_of(layer, i), layer["grouping"]) for i, layer in enumerate(layers) if layer.get("grouping")
    ]
