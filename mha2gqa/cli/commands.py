"""The command line: options -> one call -> one rendering. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import atexit
import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import click

from .. import __version__
from ..config.sections import Method, Objective, Protocol, Train
from .exit_codes import run_command
from .options import (
    COUNT,
    GROUPS,
    NAMES,
    SIZE,
    common,
    fit_words,
    given,
    given_once,
    option,
    options,
    training_words,
)
from .output import check_output, emit, write_json
from .progress import shown_progress

trust = option(
    "--trust-remote-code", is_flag=True, default=None, help="Run the model's own code (dangerous)."
)
device = option("--device", help="cpu, cuda, … (default auto).")
seed = option("--seed", type=int, help="Of everything random (default 0).")
text_column = option(
    "--text-column", metavar="NAME", help="Column of JSONL, Parquet, hub data (default text)."
)
sets = option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key of the recipe.")
dry_run = option("--dry-run", is_flag=True, help="Check everything, run nothing, read no weights.")
force = option("--force", is_flag=True, default=None, help="Replace an output that we made earlier.")
groups = option("--groups", "--kv-heads", "groups", type=GROUPS, metavar="G", help="KV heads of the result.")
as_ = option(
    "--as", "as_", metavar="TYPE", help="auto (default), none, or the architecture to write the model as."
)
revision = option("--revision", help="Branch, tag or commit on the Hub.")
data_required = option(
    "--data", multiple=True, required=True, metavar="DATA", help="File, folder, glob, NAME[:CONFIG[:SPLIT]]."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="mha2gqa %(version)s")
@common
def cli() -> None:
    """Turn multi-head-attention checkpoints into grouped-query ones, almost without retraining.

    \b
    First steps:
      mha2gqa demo                        the whole job on an embedded tiny model
      mha2gqa plan MODEL                  what a conversion would give and need
      mha2gqa convert MODEL OUT --groups 8 --calibration TEXT.jsonl
      mha2gqa evaluate MODEL OUT --data HELDOUT.jsonl
    """


@cli.command()
@click.argument("source")
@options(groups, as_, revision)
@option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks the result will be served on.")
@option("--batch", type=click.IntRange(1), help="Sequences decoded at once (default 1).")
@option("--context", type=COUNT, help="Tokens per sequence (default the model's own).")
@option("--gpu-memory", type=SIZE, help="Of one device (default 80GB).")
@option("--bandwidth", type=SIZE, help="Memory bytes per second of one device (default 3.35TB).")
@common
def plan(source: str, **words: Any) -> None:
    """Say what converting SOURCE would give and need, reading no weights."""
    with shown_progress("plan"):
        from ..commands.estimate import plan as call

        result = call(source, **given(words))
    emit(result)


@cli.command()
@click.argument("source")
@click.argument("out")
@option(
    "--groups",
    "--kv-heads",
    "groups",
    type=GROUPS,
    required=True,
    metavar="G",
    help="KV heads of the result.",
)
@option(
    "--method", type=click.Choice(get_args(Method)), help="Default: joint with calibration text, else mean."
)
@option("--calibration", multiple=True, metavar="DATA", help="Text to calibrate on; repeatable.")
@option("--calibration-tokens", type=COUNT, help="How much of it to use (default 524288).")
@option("--calibration-window", type=COUNT, help="Tokens of a block of it.")
@text_column
@option("--statistics", metavar="FILE", help="Saved calibration statistics: used if there, else written.")
@option("--grouping", metavar="NAME|FILE", help="neighbours, search, or a file of partitions.")
@option("--refit/--no-refit", default=None, help="Closed-form refit of the output projection.")
@option("--reconstruct/--no-reconstruct", default=None, help="Layer-local regression after merging.")
@option("--fit", "fit", multiple=True, metavar="KEY=VALUE", help="How hard those two try, such as steps=300.")
@as_
@option("--untie", is_flag=True, default=None, help="Store the output head apart where it is the embedding.")
@option("--attention", type=NAMES, metavar="KINDS", help="self, cross or self,cross, where a model has both.")
@options(device, seed)
@option("--max-shard-size", type=SIZE, help="Such as 5GB (default: the source's files).")
@options(revision, force, trust, common)
def convert(source: str, out: str, **words: Any) -> None:
    """Write SOURCE with G key/value heads to the new folder OUT."""
    fit = fit_words(words.pop("fit"))
    groups = words.pop("groups")
    from ..verification.background import Checker

    early: AbstractContextManager[Checker | None] = nullcontext()
    if not words["calibration"]:  # which needs both here
        early = Checker()  # first of all: it loads transformers while this process loads torch and copies
        gc.set_threshold(10_000)  # hundreds of thousands of objects are imported, none of them garbage
    with shown_progress("convert"), early as checker:
        from ..conversion.checkpoint import convert as call
        from ..reconstruct import ReconstructConfig

        words["fit"] = ReconstructConfig(**fit) if fit else None
        result = call(source, out, groups, checker=checker, **given(words))
    emit(result)


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@data_required
@text_column
@option("--protocol", type=click.Choice(get_args(Protocol)), help="How text is scored (default window).")
@option("--window", type=COUNT, help="Tokens of a window.")
@option("--stride", type=COUNT, help="Tokens between windows.")
@option("--batch-size", type=click.IntRange(1), help="Windows per forward pass.")
@option("--max-tokens", type=COUNT, help="Stop after so many scored tokens.")
@option("--dtype", help="auto, float32, bfloat16, …")
@device
@option("--against", metavar="MODEL", help="Also measure agreement with this original.")
@option(
    "--bos",
    type=click.Choice(["auto", "always", "never"]),
    help="A BOS before what is scored (default auto).",
)
@option(
    "--tasks",
    metavar="NAME,…",
    callback=lambda context, parameter, value: value and value.split(","),
    help="Also run these lm-eval tasks (names, or YAML files).",
)
@option("--task-limit", type=click.IntRange(1), help="At most so many examples of each task.")
@option("--max-ppl-ratio", type=float, help="Gate: exit 3 if perplexity over the first model's exceeds this.")
@option("--min-agreement", type=float, help="Gate: exit 3 if top-1 agreement with --against is below this.")
@option("--fail-if-worse", is_flag=True, default=None, help="Gate: exit 3 if worse than the first model.")
@option("--output", metavar="FILE", help="Also write the JSON to a file.")
@options(trust, common)
def evaluate(models: tuple[str, ...], data: tuple[str, ...], output: str | None, **words: Any) -> None:
    """Score models on the same held-out tokens: loss, perplexity, bits/byte, KV bytes."""
    limits = given({name: words.pop(name) for name in ("max_ppl_ratio", "min_agreement", "fail_if_worse")})
    check_output(output)
    with shown_progress("evaluate"):
        from ..evaluation import EvaluateConfig, check_limits, measure_gates, require
        from ..evaluation import evaluate as call

        scored = EvaluateConfig(models, (), against=words["against"]).subjects
        check_limits(len(scored), words["against"] is not None, **limits)
        result = call(list(models), list(data), **given(words)).to_dict()
    gates = measure_gates(result["models"], **limits)
    result |= {"gates": gates} if gates else {}
    emit(result)
    if output:
        write_json(result, output)
    require(gates)


@cli.command()
@click.argument("model")
@click.argument("out")
@data_required
@text_column
@option("--alpha", type=float, help="Fraction of the original pretraining tokens, such as 0.05.")
@option("--original-tokens", type=COUNT, help="Tokens the model was pretrained on.")
@option("--original-steps", type=COUNT, help="The same, in steps of --original-batch-tokens.")
@option("--original-batch-tokens", type=COUNT, help="Tokens per original step.")
@option("--tokens", type=COUNT, help="The budget itself, instead of --alpha.")
@option("--teacher", metavar="MODEL", help="Model to distil from; none for cross-entropy alone.")
@option("--teacher-top-k", type=COUNT, help="Ask it once, keep its K likeliest tokens of each position.")
@option("--teacher-cache", metavar="DIR", help="Folder of those, for further runs on the same blocks.")
@option("--train", type=click.Choice(get_args(Train)), help="Parameter set (default all).")
@option(
    "--objective", type=click.Choice(get_args(Objective)), help="Default: what the model was pretrained on."
)
@option("--window", type=COUNT, help="Tokens per block.")
@option("--batch-tokens", type=COUNT, help="Tokens per optimiser step over all processes.")
@option("--learning-rate", type=float, help="Peak learning rate.")
@option("--eval-data", multiple=True, metavar="DATA", help="Held-out text; by default a share of --data.")
@option("--holdout", type=float, help="Share of documents held out when there is no --eval-data.")
@option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any other uptrain word of a recipe.")
@options(device, seed, force, trust, common)
def uptrain(model: str, out: str, data: tuple[str, ...], overrides: tuple[str, ...], **words: Any) -> None:
    """Continue pretraining MODEL into OUT for a fraction of its original budget. Resumes by itself."""
    further = training_words(overrides)
    with shown_progress("uptrain"):
        from ..uptraining import uptrain as call

        result = call(model, out, list(data), **given_once(given(words), further))
    emit(result)


@cli.command()
@click.argument("recipe", type=click.Path())
@options(sets, dry_run, force, common)
def run(recipe: str, overrides: tuple[str, ...], dry_run: bool, force: bool | None) -> None:
    """Do a whole RECIPE: convert, evaluate, uptrain, evaluate, report. Finished stages are skipped."""
    from ..config import load_recipe

    loaded = load_recipe(recipe, overrides)
    with shown_progress("run"):
        from ..commands.run_recipe import run as call

        result = call(loaded, dry_run=dry_run, force=bool(force))
    emit(result)


@cli.command()
@click.argument("recipe", type=click.Path())
@options(sets, dry_run, force, common)
def sweep(recipe: str, overrides: tuple[str, ...], dry_run: bool, force: bool | None) -> None:
    """Do the grid of a RECIPE's sweep section: one table, one frontier. Finished cells are skipped."""
    from ..config import load_recipe

    loaded = load_recipe(recipe, overrides)
    with shown_progress("sweep"):
        from ..commands.sweep import sweep as call

        result = call(loaded, dry_run=dry_run, force=bool(force))
    emit(result)


@cli.command()
@click.argument("out")
@option("--against", metavar="SOURCE", help="The original: unchanged tensors must be equal to its own.")
@option("--full", is_flag=True, help="Read every tensor.")
@common
def verify(out: str, **words: Any) -> None:
    """Check a converted folder OUT: keys, shapes, config, oracles. Exit 1 if a check fails."""
    from ..errors import CheckpointError

    with shown_progress("verify"):
        from ..verification.checks import failed
        from ..verification.checks import verify as call

        result = call(out, **words)
    emit(result)
    if broken := failed(result.checks):
        raise CheckpointError(f"check failed: {broken}", where=out, fix="convert again from the source")


@cli.command()
@common
def archs() -> None:
    """List architectures: supported, re-expressed as another, refused and why."""
    from ..architectures import list_architectures
    from ..results import headed

    emit(headed("archs", list_architectures()))


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@option("--batch", type=click.IntRange(1), help="Sequences decoded at once (default 1).")
@option(
    "--context", type=COUNT, help="Tokens that a step attends to (default 1024), as far as the models reach."
)
@option("--new-tokens", type=COUNT, help="Decode steps that are timed (default 64).")
@option("--dtype", help="auto, float32, bfloat16, …")
@option("--bandwidth", type=SIZE, help="Memory bytes per second of the device (default measured by a copy).")
@option(
    "--memory",
    type=SIZE,
    multiple=True,
    help="Also time the largest batch of this memory budget. Repeatable.",
)
@option("--compile/--no-compile", default=None, help="Compile the layers (default on a GPU).")
@options(device, trust, common)
def bench(models: tuple[str, ...], **words: Any) -> None:
    """Time the decode step that servers run, under the same conditions for all models."""
    with shown_progress("bench"):
        from ..commands.bench import bench as call

        result = call(list(models), **given(words))
    emit(result)


@cli.command()
@click.argument("model")
@click.argument("out")
@option("--to", type=click.Choice(["gguf", "ct2", "onnx"]), required=True, help="The engine's format.")
@option(
    "--precision", metavar="NAME", help="As the engine's converter names it: f16, q8_0; int8; fp32, int4."
)
@option("--llama-cpp", metavar="DIR", help="Sources of llama.cpp (default: what LLAMA_CPP names).")
@option(
    "--pre-tokenizer", metavar="NAME", help="How llama.cpp splits text, where it does not know the tokenizer."
)
@option("--text", metavar="FILE", help="Text whose first 100 lines must be read alike (default: built in).")
@options(force, common)
def export(model: str, out: str, **words: Any) -> None:
    """Write MODEL in an engine's format by the engine's own converter, and check its tokenizer."""
    with shown_progress("export"):
        from ..commands.export import export as call

        result = call(model, out, **given(words))
    emit(result)


@cli.command()
@click.argument("folder")
@click.argument("repo", metavar="ORG/NAME")
@option("--private", is_flag=True, default=None, help="Make the repository private.")
@option("--dry-run", is_flag=True, default=None, help="Say what would be uploaded.")
@option("--message", help="Commit message.")
@common
def push(folder: str, repo: str, **words: Any) -> None:
    """Upload a verified FOLDER to the Hub as ORG/NAME. Never done by any other command."""
    with shown_progress("push"):
        from ..commands.push import push as call

        result = call(folder, repo, **given(words))
    emit(result)


@cli.command()
@option("--out", metavar="DIR", help="Where to work (default mha2gqa-demo).")
@option("--groups", "--kv-heads", "groups", type=GROUPS, metavar="G", help="KV heads (default 2 of 8).")
@options(force, common)
def demo(**words: Any) -> None:
    """The whole job on an embedded tiny model, offline, in about a minute."""
    with shown_progress("demo"):
        from ..commands.demo import demo as call

        result = call(**given(words))
    emit(result)


@cli.command()
@common
def env() -> None:
    """Versions and devices, for bug reports."""
    from ..commands.env import environment

    emit(environment())


def main() -> None:
    """Console entry point."""
    atexit.register(gc.freeze)  # the process ends: half a second's search for garbage would help nobody
    run_command(cli)
