"""Results of commands for the terminal: from the same plain data that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .content import COLUMNS, becomes, differences, model_rows, scoring
from .tables import Column, box_size, fixed, human_bytes, human_count, significant, text_table

Data = Mapping[str, Any]


def render(data: Data) -> str:
    """A result as text.

    Args:
        data: `to_dict()` of a result; its `command` chooses the form.

    Returns:
        Lines without a final newline.
    """
    return _RENDERERS.get(str(data.get("command")), _plain)(data).rstrip()


def _plan(data: Data) -> str:
    kv, decode = data["num_kv_heads"], data["decode"]
    lines = [
        f"{data['source']}: {_result_type(data)}",
        f"{data['layers']} attention layers to change, "
        f"{data['num_heads']} query heads of {data['head_dim']}, {kv['before']} KV heads -> {kv['after']} "
        f"(groups of {kv['before'] // kv['after']})",
        "",
        _options_table(data),
        "",
        f"Decoding at batch {decode['batch']}, context {decode['context']:,}: a step moves "
        f"{_change(decode['step_bytes'])}; at {box_size(decode['bandwidth'])}/s at most "
        f"{_change(decode['tokens_per_second_ceiling'], human_count)} tokens/s.",
        f"Sequences that fit {box_size(decode['gpu_memory'])} beside the weights, a tenth kept free: "
        f"{_change(decode['max_batch'], str)}.",
        f"Converting writes {human_bytes(data['conversion']['disk_bytes'])}, needs about "
        f"{human_bytes(data['conversion']['memory_bytes'])} of memory and, at 500 MB/s of disk, about "
        f"{significant(data['conversion']['seconds'], 2)} s (calibration comes on top).",
        "",
        "Uptraining: weights, gradients, AdamW state and a bf16 teacher (activations come on top):",
        _memory_table(data["memory"]),
    ]
    if not data["exact"]:
        lines += ["", "No weights were found: sizes come from the config."]
    return "\n".join([*lines, *_notes(data), "", f"Next: {data['recommended']}"])


def _result_type(data: Data) -> str:
    """What the model becomes, and what loading the result takes."""
    kinds = becomes(data["model_type"], data["result_type"])
    if data["trust_remote_code"]:
        return f"{kinds}: modelling code travels with the result, which loads with trust_remote_code=True"
    same = ", which computes the same" if data["reexpression"] else ""
    return f"{kinds}{same}; the result loads without trust_remote_code"


def _options_table(data: Data) -> str:
    columns: list[Column] = [("G", ">"), ("heads/group", ">"), ("parameters", ">"), ("checkpoint", ">")]
    columns += [("KV/token", ">"), ("KV cache", ">"), ("sequences", ">"), ("which", "<")]
    marks = {data["num_kv_heads"]["before"]: "now", data["groups"]: "chosen"}
    several = len({o["model_type"] for o in data["options"]}) > 1
    columns += [("as", "<")] if several else []
    rows = [
        [
            str(o["groups"]),
            str(o["group_size"]),
            human_count(o["parameters"]),
            human_bytes(o["bytes"]),
            human_bytes(o["kv_bytes_per_token"]),
            human_bytes(o["kv_bytes"]),
            str(o["max_batch"]),
            marks.get(o["groups"], ""),
            *([o["model_type"]] if several else []),
        ]
        for o in data["options"]
    ]
    return text_table(columns, rows)


def _memory_table(memory: Data) -> str:
    columns: list[Column] = [
        ("--train", "<"),
        ("trained", ">"),
        ("memory", ">"),
        ("no teacher", ">"),
        ("fits", "<"),
    ]
    size = box_size(memory["gpu_memory"])
    rows = [
        [
            name,
            human_count(found["trained_parameters"]),
            human_bytes(found["bytes"]),
            human_bytes(found["without_teacher"]),
            f"{found['gpus'] or 'more than ' + str(found['most_gpus'])} x {size}",
        ]
        for name, found in memory["sets"].items()
    ]
    return text_table(columns, rows)


def _change(pair: Data, form: Callable[[Any], str] = human_bytes) -> str:
    return f"{form(pair['before'])} -> {form(pair['after'])}"


def _convert(data: Data) -> str:
    kv = data["num_kv_heads"]
    types = data.get("reexpression")
    kinds = f"{becomes(types['source_type'], types['target_type'])}, " if types else ""
    lines = [
        f"{data['source']} -> {data['output']}: {kinds}{kv['before']} KV heads -> {kv['after']}, "
        f"method {data['method']}"
    ]
    if data["layers"]:
        lines += ["", _layers_table(data["layers"])]
    losses = (data.get("calibration") or {}).get("losses")
    if losses:
        figures = ", ".join(f"{name} {fixed(value, 4)}" for name, value in losses.items())
        lines += ["", f"Loss on held-out calibration text: {figures}"]
    return "\n".join([*lines, *_notes(data), "", _checks(data["verification"])])


def _layers_table(layers: Sequence[Data]) -> str:
    numbers = sorted({k for layer in layers for k, v in layer.items() if isinstance(v, float)})
    nested = sorted(
        {
            (k, n)
            for layer in layers
            for k, v in layer.items()
            if isinstance(v, Mapping)
            for n in v
            if _number(v[n])
        }
    )
    columns: list[Column] = [("layer", "<")]
    columns += [(name.replace("_", " "), ">") for name in numbers]
    columns += [(f"{name.replace('_', ' ')} {part}", ">") for name, part in nested] + [("groups", "<")]
    rows = []
    for layer in layers:
        cells = [fixed(layer.get(name), 4) for name in numbers]
        cells += [fixed((layer.get(name) or {}).get(part), 4) for name, part in nested]
        kind = "" if layer.get("kind", "self") == "self" else f" {layer['kind']}"
        moved = "regrouped" if layer.get("regrouped") else "neighbours"
        rows.append([f"{layer.get('layer')}{kind}", *cells, moved])
    return text_table(columns, rows)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _evaluate(data: Data) -> str:
    rows = [
        {"role": "original" if i == 0 else "", **row, "label": row["path"]}
        for i, row in enumerate(data["models"])
    ]
    lines = [scoring(data), "", text_table(COLUMNS, model_rows(rows))]
    found = differences(rows)
    for gate in data.get("gates") or ():
        verdict = "ok" if gate["ok"] else "FAILED"
        found.append(f"gate {gate['gate']} {gate['limit']}: {gate['model']} has {gate['value']}: {verdict}")
    tasks = _tasks(rows)
    return "\n".join([*lines, *tasks, *([""] if found else []), *found, *_notes(data)])


def _tasks(rows: Sequence[Data]) -> list[str]:
    """One line a task and metric, one column a model; nothing where no tasks were run."""
    names = {
        (task, metric): None
        for row in rows
        for task, values in (row.get("tasks") or {}).items()
        for metric in values
        if not metric.split(",")[0].endswith("_stderr")
    }
    cells = [
        [task, metric, *(fixed(((row.get("tasks") or {}).get(task) or {}).get(metric), 4) for row in rows)]
        for task, metric in names
    ]
    columns = [("task", "<"), ("metric", "<"), *((str(row["label"]), ">") for row in rows)]
    return ["", text_table(columns, cells)] if cells else []


def _uptrain(data: Data) -> str:
    budget, losses = data["budget"], data["losses"]
    alpha = budget.get("alpha")
    share = f"alpha {significant(alpha)}" if alpha else "share of the original budget unknown"
    lines = [f"{data['output']}: {human_count(budget['tokens'])} tokens in {budget['steps']} steps ({share})"]
    start, end = losses.get("held_out_start"), losses.get("held_out_end")
    if start is not None and end is not None:
        lines.append(f"held-out loss {fixed(start, 4)} -> {fixed(end, 4)}")
    speed = data.get("throughput") or {}
    if speed.get("tokens_per_second"):
        lines.append(f"{human_count(speed['tokens_per_second'])} tokens/s")
    return "\n".join([*lines, *_notes(data)])


def _run(data: Data) -> str:
    planned = [stage for stage in data["stages"] if stage["status"] == "planned"]  # the others were logged
    lines = [f"{stage['name']}: {stage['detail']}" for stage in planned]
    if data.get("models"):
        lines += [text_table(COLUMNS, model_rows(data["models"]))]
    if data.get("headline"):
        lines += ["", data["headline"]]
    lines += [f"wrote {path}" for path in data.get("written") or ()]
    return "\n".join([*lines, *_notes(data), *(f"\n{text}" for text in data.get("next") or ())])


def _verify(data: Data) -> str:
    return _checks(data["checks"])


def _checks(checks: Sequence[Data]) -> str:
    words = {True: "ok", False: "FAILED", None: "not checked"}
    rows = [[words[check["ok"]], check["name"], check["detail"]] for check in checks]
    return text_table([("check", "<"), ("", "<"), ("", "<")], rows)


def _archs(data: Data) -> str:
    supported = [[row["model_type"], str(row.get("proven", ""))] for row in data["supported"]]
    again = [[row["model_type"], _route(row)] for row in data["reexpressed"]]
    refused = [[row["model_type"], row["reason"]] for row in data["refused"]]
    return "\n\n".join(
        text_table([(title, "<"), (second, "<")], rows)
        for title, second, rows in (
            (f"supported ({len(supported)})", "proven", supported),
            (f"re-expressed ({len(again)})", "as", again),
            (f"refused ({len(refused)})", "because", refused),
        )
        if rows
    )


def _route(row: Data) -> str:
    """Where to, and under what conditions."""
    few = "for G = 1" if row["groups"] == "1" else ""
    named = row["option"] if row["option"] != "--as auto" else ""
    conditions = ", ".join(filter(None, (few, row["when"], named and f"only with {named}")))
    return f"{row['as']} ({conditions})" if conditions else str(row["as"])


def _bench(data: Data) -> str:
    columns: list[Column] = [
        ("model", "<"),
        ("tokens/s", ">"),
        ("ms/step", ">"),
        ("KV cache", ">"),
        ("step moves", ">"),
        ("bandwidth used", ">"),
        ("first token", ">"),
    ]
    rows = [
        [
            row["path"],
            human_count(row["tokens_per_second"]),
            significant(row["milliseconds_per_step"]),
            human_bytes(row["kv_bytes"]),
            human_bytes(row["step_bytes"]),
            f"{human_bytes(row['bytes_per_second'])}/s" + _share(row),
            f"{significant(row['first_token_milliseconds'])} ms",
        ]
        for row in data["models"]
    ]
    where = f"batch {data['batch']}, context {data['context']:,}, {data['dtype']} on {data['device']}"
    if data.get("copy_bandwidth"):
        where += f", which copies {human_bytes(data['copy_bandwidth'])}/s"
    budgets = [
        f"{row['path']}: {human_bytes(budget['memory_bytes'])} of memory hold batch {budget['batch']}, "
        + (
            f"{human_count(budget['tokens_per_second'])} tokens/s"
            if budget["tokens_per_second"]
            else f"not timed: {budget['reason']}"
        )
        for row in data["models"]
        for budget in row.get("budgets", ())
    ]
    steps = dict.fromkeys(f"timed: {row['step']}, attention {row['attention']}" for row in data["models"])
    own = [f"{row['path']}: {warning}" for row in data["models"] for warning in row.get("warnings", ())]
    more = {**data, "warnings": [*data.get("warnings", ()), *own]}
    return "\n".join([where, "", text_table(columns, rows), "", *budgets, *steps, *_notes(more)])


def _share(row: Data) -> str:
    share = row.get("share_of_bandwidth")
    return "" if share is None else f" ({share:.0%})"


def _export(data: Data) -> str:
    files = [
        f"wrote {data['output']}: {', '.join(data['files'][:5])}" + (" …" if len(data["files"]) > 5 else "")
    ]
    return "\n".join([*files, *(f"{check['name']}: {check['detail']}" for check in data["verification"])])


def _push(data: Data) -> str:
    where = data["url"] or f"would go to {data['repo']} (dry run)"
    return f"{len(data['files'])} files, {human_bytes(data['bytes'])}: {where}"


def _env(data: Data) -> str:
    rows = [[name, version] for name, version in data["versions"].items()]
    rows += [["platform", data["platform"]], ["CPUs", str(data["cpus"])]]
    rows += [
        [f"device {i}", f"{d['name']}, {human_bytes(d['memory'])}"] for i, d in enumerate(data["devices"])
    ]
    rows += [[name, value] for name, value in data["variables"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _notes(data: Data) -> list[str]:
    notes = list(dict.fromkeys([*(data.get("warnings") or ()), *(data.get("notices") or ())]))
    return ["", *(f"note: {note}" for note in notes)] if notes else []


def _plain(data: Data) -> str:
    return "\n".join(f"{key}: {value}" for key, value in data.items())


_RENDERERS: dict[str, Callable[[Data], str]] = {
    "plan": _plan,
    "convert": _convert,
    "evaluate": _evaluate,
    "uptrain": _uptrain,
    "run": _run,
    "sweep": _run,
    "demo": _run,
    "verify": _verify,
    "archs": _archs,
    "bench": _bench,
    "push": _push,
    "export": _export,
    "env": _env,
}
