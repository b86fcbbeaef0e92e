"""What the result of each command says, as lines and tables: from the same plain data that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import listed
from ..progress import duration
from .cache import cache_sentences
from .content import (
    Column,
    Table,
    becomes,
    calibration_losses,
    differences,
    models_table,
    scoring,
    training_losses,
    wide_heads,
    wide_sentence,
)
from .layers import layers_table
from .numbers import box_size, fixed, human_bytes, human_count, significant
from .training import memory_table, price_table, training_sentences

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line, or several.

    Args:
        text: What it says.
        style: How rich shows it on a terminal.
        wrap: Whether a terminal may break it between words; a command is not broken, so that it can be copied.
    """

    text: str = ""
    style: str = ""
    wrap: bool = True


Block = Line | Table
BLANK = Line()


def view(data: Data) -> list[Block]:
    """A result as blocks; its `command` chooses the form."""
    return list(_VIEWS.get(str(data.get("command")), _plain)(data))


def _plan(data: Data) -> Iterable[Block]:
    kv, decode = data["num_kv_heads"], data["decode"]
    yield Line(f"{data['source']}: {_result_type(data)}")
    yield Line(
        f"{data['layers']} attention layers to change, "
        f"{data['num_heads']} query heads of {data['head_dim']}, {kv['before']} KV heads -> {kv['after']} "
        f"(groups of {kv['before'] // kv['after']})"
    )
    yield BLANK
    yield _options_table(data)
    yield BLANK
    yield Line(
        f"Decoding at batch {decode['batch']}, context {decode['context']:,}: a step moves "
        f"{_change(decode['step_bytes'])}; at {box_size(decode['bandwidth'])}/s at most "
        f"{_change(decode['tokens_per_second_ceiling'], human_count)} tokens/s."
    )
    yield from _wide_heads(data)
    parts = data.get("sequence") or {}
    yield from (Line(f"{line}.") for line in cache_sentences([(when, parts[when]) for when in parts]))
    yield Line(
        f"Sequences that fit {box_size(decode['gpu_memory'])} beside the weights, a tenth kept free: "
        f"{_change(decode['max_batch'], str)}."
    )
    yield Line(
        f"Converting writes {human_bytes(data['conversion']['disk_bytes'])}, needs about "
        f"{human_bytes(data['conversion']['memory_bytes'])} of memory and, at 500 MB/s of disk, about "
        f"{significant(data['conversion']['seconds'], 2)} s without text."
    )
    yield from _calibration_lines(data.get("calibration") or {})
    if data["memory"]["sets"]:
        yield BLANK
        yield Line(
            "Uptraining: weights, gradients, AdamW state and a bf16 teacher (activations come on top):"
        )
        yield memory_table(data["memory"])
        yield BLANK
        yield from _training_prices(data["memory"])
    if not data["exact"]:
        yield from (BLANK, Line("No weights were found: sizes come from the config."))
    yield from _warnings(data)
    yield from _next(data["recommended"])


def _training_prices(memory: Data) -> Iterable[Block]:
    """Speed and time of uptraining, or why there is no estimate."""
    if reason := memory.get("unpriced"):
        yield Line(reason)
        return
    head, *rest = training_sentences(memory)
    yield Line(head)
    yield price_table(memory)
    yield from map(Line, rest)


def _calibration_lines(price: Data) -> Iterable[Block]:
    """What calibration costs: time, memory of the device, of the host, and of the work folder."""
    if not price:
        return
    fits, closed = price["regression"], price["closed_form"]
    on = f" on {price['gpus']} devices" if price["gpus"] > 1 else ""
    text = f"{human_count(price['tokens'])} tokens"
    if recordings := price.get("recordings"):
        text = f"at most {recordings:,} recordings ({human_count(price['tokens'])} encoder positions)"
    whole = ", all parameters of a layer trained" if price.get("trained") == "layer" else ""
    yield Line(
        f"Calibrating on {text}{on}, layer by layer{whole}: up to {duration(fits['seconds'])} on "
        f"a card like an H100, {duration(closed['seconds'])} with --no-reconstruct. In use at the peak: "
        f"{human_bytes(fits['device_bytes'])} of GPU memory ({human_bytes(fits['device_bytes_cached'])} with what PyTorch "
        f"caches), {human_bytes(price['host_bytes'])} of host memory or disk, {human_bytes(price['disk_bytes'])} of disk "
        "to go on after an interruption."
    )


def _wide_heads(data: Data) -> Iterable[Block]:
    """What wide heads cost, and a decode step beside those of plain ones."""
    if not (wide := data.get("wide")):
        return
    groups, weights = data["groups"], wide["weight_bytes"]
    yield Line(
        f"Wide heads: {wide['num_kv_heads']} x {wide['head_dim']} with the cache of GQA-{groups}. Weights "
        f"{human_bytes(weights['wide'])}, of GQA-{groups} {human_bytes(weights['plain'])}; arithmetic of attention "
        f"{wide['wide']} times. A decode step moves, against GQA-{groups}"
        + (f" and GQA-{2 * groups}:" if "double" in weights else ":")
    )
    columns: list[Column] = [("batch", ">"), ("context", ">"), ("bytes", ">"), (f"to GQA-{groups}", ">")]
    columns += [(f"to GQA-{2 * groups}", ">")] if "double" in weights else []
    others = ["plain", *(["double"] if "double" in weights else [])]
    rows = [
        [
            str(step["batch"]),
            f"{step['context']:,}",
            human_bytes(step["wide_bytes"]),
            *(f"{step['wide_bytes'] / step[f'{other}_bytes'] - 1:+.0%}" for other in others),
        ]
        for step in wide["steps"]
    ]
    yield Table(columns, rows)
    if (least := wide["pays_above_cached_tokens"]) is not None:
        yield Line(
            f"Beyond {least:,} cached tokens over the batch a step moves less than with GQA-{2 * groups}."
        )
    yield BLANK


def _result_type(data: Data) -> str:
    """What the model becomes, and what loading the result takes."""
    kinds = becomes(data["model_type"], data["result_type"])
    if data["trust_remote_code"]:
        return f"{kinds}: modelling code travels with the result, which loads with trust_remote_code=True"
    same = ", which computes the same" if data["reexpression"] else ""
    return f"{kinds}{same}; the result loads without trust_remote_code"


def _options_table(data: Data) -> Table:
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
    return Table(columns, rows)


def _change(pair: Data, form: Callable[[Any], str] = human_bytes) -> str:
    return f"{form(pair['before'])} -> {form(pair['after'])}"


def _convert(data: Data) -> Iterable[Block]:
    kv, types = data["num_kv_heads"], data.get("reexpression")
    kinds = f"{becomes(types['source_type'], types['target_type'])}, " if types else ""
    wide = wide_heads(data)
    yield Line(
        f"{data['source']} -> {data['output']}: {kinds}{kv['before']} KV heads -> {kv['after']}"
        f"{f', {wide_sentence(wide)}' if wide else ''}, method {data['method']}"
    )
    if data["layers"]:
        yield from (BLANK, layers_table(data["layers"]))
    yield from (BLANK, _checks(data["verification"]))
    yield from _warnings(data)
    yield from (BLANK, *_gained(data))
    yield from _next(data["recommended"])


def _gained(data: Data) -> Iterable[Block]:
    """How much smaller the cache is, and what that costs, as far as it was measured."""
    cache = data.get("kv_bytes_per_token")
    if cache and cache["after"] and cache["before"] > cache["after"]:
        ratio = significant(cache["before"] / cache["after"])
        cross = "cross" in (data.get("attention") or ())
        each = "for a target token and an encoder position" if cross else "a token"
        yield Line(f"KV cache {ratio}x smaller: {_change(cache)} {each}.", "bold")
    if losses := calibration_losses(data.get("calibration") or {}):
        yield Line(f"{losses[0].upper()}{losses[1:]}", "bold")


def _evaluate(data: Data) -> Iterable[Block]:
    rows = [
        {"role": "original" if i == 0 else "", **row, "label": row["path"]}
        for i, row in enumerate(data["models"])
    ]
    yield from (Line(scoring(data)), BLANK, models_table(rows))
    yield from _tasks(rows)
    found = [Line(line) for line in differences(rows)]
    for gate in data.get("gates") or ():
        verdict = "ok" if gate["ok"] else "FAILED"
        text = f"gate {gate['gate']} {gate['limit']}: {gate['model']} has {gate['value']}: {verdict}"
        found.append(Line(text, STYLES[verdict]))
    if found:
        yield from (BLANK, *found)
    yield from _warnings(data)


def _tasks(rows: Sequence[Data]) -> Iterable[Block]:
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
    return [BLANK, Table(columns, cells)] if cells else []


def _uptrain(data: Data) -> Iterable[Block]:
    budget, losses = data["budget"], data["losses"]
    alpha = budget.get("alpha")
    share = f"alpha {significant(alpha)}" if alpha else "share of the original budget unknown"
    yield Line(
        f"{data['output']}: {human_count(budget['tokens'])} tokens in {budget['steps']} steps ({share})"
    )
    for name, first, last in training_losses(losses):
        yield Line(f"{name} {fixed(first, 4)} -> {fixed(last, 4)}", "bold")
    speed = data.get("throughput") or {}
    if speed.get("tokens_per_second"):
        yield Line(f"{human_count(speed['tokens_per_second'])} tokens/s")
    yield from _warnings(data)


def _run(data: Data) -> Iterable[Block]:
    planned = [stage for stage in data["stages"] if stage["status"] == "planned"]  # the others were logged
    yield from (Line(f"{stage['name']}: {stage['detail']}") for stage in planned)
    if data.get("models"):
        yield models_table(data["models"])
    if data.get("headline"):
        yield from (BLANK, Line(data["headline"], "bold"))
    yield from (Line(f"wrote {path}", "dim", wrap=False) for path in data.get("written") or ())
    yield from _warnings(data)
    for text in data.get("next") or ():
        yield from (BLANK, Line(text, wrap=False))


def _verify(data: Data) -> Iterable[Block]:
    yield _checks(data["checks"])


def _checks(checks: Sequence[Data]) -> Table:
    verdicts = {True: "ok", False: "FAILED", None: "not checked"}
    rows = [[verdicts[check["ok"]], check["name"], check["detail"]] for check in checks]
    return Table([("check", "<"), ("", "<"), ("", "<")], rows)


def _archs(data: Data) -> Iterable[Block]:
    supported = [[row["model_type"], str(row.get("proven", ""))] for row in data["supported"]]
    again = [[row["model_type"], _route(row)] for row in data["reexpressed"]]
    refused = [[row["model_type"], row["reason"]] for row in data["refused"]]
    for title, second, rows in (
        (f"supported ({len(supported)})", "proven", supported),
        (f"written as another architecture ({len(again)})", "as", again),
        (f"refused ({len(refused)})", "because", refused),
    ):
        if rows:
            yield from (Table([(title, "<"), (second, "<")], rows), BLANK)


def _route(row: Data) -> str:
    """Where to, and under what conditions."""
    few = "for G = 1" if row["groups"] == "1" else ""
    named = row["option"] if row["option"] != "--as auto" else ""
    conditions = ", ".join(filter(None, (few, row["when"], named and f"only with {named}")))
    return f"{row['as']} ({conditions})" if conditions else str(row["as"])


def _bench(data: Data) -> Iterable[Block]:
    columns: list[Column] = [("model", "<"), ("tokens/s", ">"), ("ms/step", ">"), ("KV cache", ">")]
    columns += [("step moves", ">"), ("bandwidth used", ">"), ("first token", ">")]
    models = data["models"]
    rows = [
        [
            row["path"],
            human_count(row["tokens_per_second"]),
            significant(row["milliseconds_per_step"]),
            _size(row["kv_bytes"]),
            _size(row["step_bytes"]),
            _size(row["bytes_per_second"], "/s") + _share(row),
            f"{significant(row['first_token_milliseconds'])} ms",
        ]
        for row in models
    ]
    where = f"batch {data['batch']}, context {data['context']:,}, {data['dtype']} on {data['device']}"
    if data.get("engine", "transformers") != "transformers":
        where = f"{data['engine']}: {where}"
    if data.get("copy_bandwidth"):
        where += f", which copies {human_bytes(data['copy_bandwidth'])}/s"
    yield from (Line(where), BLANK, Table(columns, rows), BLANK)
    yield from (Line(_budget(row, budget)) for row in models for budget in row.get("budgets", ()))
    yield from map(
        Line, dict.fromkeys(f"timed: {row['step']}, attention {row['attention']}" for row in models)
    )
    own = [f"{row['path']}: {warning}" for row in models for warning in row.get("warnings", ())]
    yield from _warnings({**data, "warnings": [*data.get("warnings", ()), *own]})


def _size(number: float | None, unit: str = "") -> str:
    """Bytes, or a dash where the engine did not say."""
    return "–" if number is None else f"{human_bytes(number)}{unit}"


def _share(row: Data) -> str:
    share = row.get("share_of_bandwidth")
    return "" if share is None else f" ({share:.0%})"


def _budget(row: Data, budget: Data) -> str:
    """How many sequences a budget of memory holds, and how fast they are decoded."""
    speed = budget["tokens_per_second"]
    timed = f"{human_count(speed)} tokens/s" if speed else f"not timed: {budget['reason']}"
    return f"{row['path']}: {human_bytes(budget['memory_bytes'])} of memory hold batch {budget['batch']}, {timed}"


def _push(data: Data) -> Iterable[Block]:
    where = data["url"] or f"would go to {data['repo']} (dry run)"
    yield Line(f"{len(data['files'])} files, {human_bytes(data['bytes'])}: {where}")
    if data["left"]:
        yield Line(f"not part of the model, not uploaded: {listed(data['left'])}")


def _export(data: Data) -> Iterable[Block]:
    shown = ", ".join(data["files"][:5]) + (" …" if len(data["files"]) > 5 else "")
    yield Line(f"wrote {data['output']}: {shown}")
    yield from (Line(f"{check['name']}: {check['detail']}") for check in data["verification"])


def _env(data: Data) -> Iterable[Block]:
    rows = [[name, version] for name, version in data["versions"].items()]
    rows += [["platform", data["platform"]], ["CPUs", str(data["cpus"])]]
    rows += [
        [f"device {i}", f"{d['name']}, {human_bytes(d['memory'])}"] for i, d in enumerate(data["devices"])
    ]
    rows += [[name, value] for name, value in data["variables"].items()]
    width = max(len(name) for name, _ in rows)
    yield from (Line(f"{name:<{width}}  {value}") for name, value in rows)


def _warnings(data: Data) -> Iterable[Block]:
    found = dict.fromkeys([*(data.get("warnings") or ()), *(data.get("notices") or ())])
    return [BLANK, *(Line(f"warning: {text}", "yellow") for text in found)] if found else []


def _next(command: str) -> Iterable[Block]:
    return BLANK, Line(f"Next: {command}", "cyan", wrap=False)


def _plain(data: Data) -> Iterable[Block]:
    yield from (Line(f"{key}: {value}") for key, value in data.items())


STYLES = {"ok": "green", "FAILED": "bold red", "not checked": "yellow"}
_VIEWS: dict[str, Callable[[Data], Iterable[Block]]] = {
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
    "env": _env,
    "export": _export,
}
