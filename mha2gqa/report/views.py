"""What the result of each command says, as lines and tables: from the same plain data that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import listed
from .content import Column, Table, becomes, differences, models_table, scoring, wide_heads, wide_sentence
from .headline import calibration_losses, training_losses
from .layers import layers_table
from .lines import BLANK, Block, Data, Line, change, next_lines, warning_lines
from .numbers import fixed, human_bytes, human_count, significant
from .plan_view import plan_view


def view(data: Data) -> list[Block]:
    """A result as blocks; its `command` chooses the form."""
    return list(_VIEWS.get(str(data.get("command")), _plain)(data))


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
    yield from warning_lines(data)
    yield from (BLANK, *_gained(data))
    yield from next_lines(data["recommended"])


def _gained(data: Data) -> Iterable[Block]:
    """How much smaller the cache is, and what that costs, as far as it was measured."""
    cache = data.get("kv_bytes_per_token")
    if cache and cache["after"] and cache["before"] > cache["after"]:
        ratio = significant(cache["before"] / cache["after"])
        cross = "cross" in (data.get("attention") or ())
        each = "for a target token and an encoder position" if cross else "a token"
        yield Line(f"KV cache {ratio}x smaller: {change(cache)} {each}.", "bold")
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
    yield from warning_lines(data)


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
    yield from warning_lines(data)


def _run(data: Data) -> Iterable[Block]:
    planned = [stage for stage in data["stages"] if stage["status"] == "planned"]  # the others were logged
    yield from (Line(f"{stage['name']}: {stage['detail']}") for stage in planned)
    if data.get("models"):
        yield models_table(data["models"])
    if data.get("headline"):
        yield from (BLANK, Line(data["headline"], "bold"))
    yield from (Line(f"wrote {path}", "dim", wrap=False) for path in data.get("written") or ())
    yield from warning_lines(data)
    for text in data.get("next") or ():
        yield from (BLANK, Line(text, wrap=False))


def _verify(data: Data) -> Iterable[Block]:
    yield _checks(data["checks"])


# Names that `--json` keeps of earlier versions, and what they are called now.
CHECK_NAMES = {"twin oracles": "tiny random model", "re-expression": "architecture conversion"}


def _checks(checks: Sequence[Data]) -> Table:
    verdicts = {True: "ok", False: "FAILED", None: "not checked"}
    names = [CHECK_NAMES.get(check["name"], check["name"]) for check in checks]
    rows = [[verdicts[check["ok"]], name, check["detail"]] for check, name in zip(checks, names, strict=True)]
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
    yield from warning_lines({**data, "warnings": [*data.get("warnings", ()), *own]})


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


def _plain(data: Data) -> Iterable[Block]:
    yield from (Line(f"{key}: {value}") for key, value in data.items())


STYLES = {"ok": "green", "FAILED": "bold red", "not checked": "yellow"}
_VIEWS: dict[str, Callable[[Data], Iterable[Block]]] = {
    "plan": plan_view,
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
