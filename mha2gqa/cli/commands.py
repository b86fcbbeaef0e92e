"""The command line: options -> one call -> one rendering. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import atexit
import gc
from dataclasses import fields
from typing import Any

import rich_click as click

from .. import __version__
from ..config import (
    BenchConfig,
    ConvertConfig,
    DemoConfig,
    EvaluateConfig,
    ExportConfig,
    GateConfig,
    PlanConfig,
    PushConfig,
    UptrainConfig,
    VerifyConfig,
    declared,
)
from ..config.evaluate import OutputConfig
from ..config.key_values import read_fit, read_sets
from ..errors import UsageError
from .exit_codes import run_command
from .options import FitCommand, common, takes
from .printing import check_output, emit, write_json
from .progress_lines import shown_progress
from .recipes import completion, recipes

MAIN, JOBS, OTHER = "Steps", "Whole jobs", "More"

click.rich_click.TEXT_MARKUP = None  # square brackets in help are just brackets
click.rich_click.MAX_WIDTH = 110
click.rich_click.COMMANDS_PANEL_TITLE = "Commands"
click.rich_click.OPTIONS_PANEL_TITLE = "Common"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.command_panel(MAIN, commands=["plan", "convert", "evaluate", "uptrain", "verify"])
@click.command_panel(JOBS, commands=["demo", "run", "sweep", "recipes"])
@click.command_panel(OTHER)
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


@cli.command(cls=FitCommand)
@takes(PlanConfig)
@common
def plan(**given: Any) -> None:
    """Say what converting SOURCE would give and need, reading no weights.

    \b
    Example:
      mha2gqa plan meta-llama/Llama-2-7b-hf --groups 8 --batch 16 --context 4096
    """
    if "fit" in given:
        given["fit"] = read_fit(given["fit"])
    PlanConfig(**given)
    with shown_progress("plan") as progress:
        from ..commands.estimate import plan as call

        progress.stage("reading headers")
        result = call(**given)
    emit(result)


@cli.command(cls=FitCommand)
@takes(ConvertConfig)
@common
def convert(**given: Any) -> None:
    """Write SOURCE with G key/value heads to the new folder OUT.

    \b
    Examples:
      mha2gqa convert MODEL OUT --groups 8 --calibration TEXT.jsonl
      mha2gqa convert MODEL OUT --groups 8 --calibration TEXT.jsonl --fit steps=2000 patience=12
      mha2gqa convert MODEL OUT --groups 8 --method mean            the GQA paper's recipe
    """
    if "fit" in given:
        given["fit"] = read_fit(given["fit"])
    ConvertConfig(**given)  # what contradicts itself is refused before anything is imported
    with shown_progress("convert"):
        from ..conversion.checkpoint import convert as call

        result = call(**given)
    emit(result)


@cli.command()
@takes(EvaluateConfig, OutputConfig, GateConfig)
@common
def evaluate(**given: Any) -> None:
    """Score models on the same held-out tokens: loss, perplexity, bits per byte, KV bytes.

    \b
    Examples:
      mha2gqa evaluate ORIGINAL CONVERTED --data HELDOUT.jsonl
      mha2gqa evaluate ORIGINAL CONVERTED --data HELDOUT.jsonl --protocol blocks --max-ppl-ratio 1.02
    """
    output = given.pop("output", None)
    limits = {name: given.pop(name) for name in declared(GateConfig) if name in given}
    check_output(output)
    with shown_progress("evaluate"):
        from ..evaluation import EvaluateConfig as Scored
        from ..evaluation import check_limits, measure_gates, measured_metrics, require
        from ..evaluation import evaluate as call

        scored = Scored(given["models"], (), against=given.get("against")).subjects
        metrics = measured_metrics(scored, given.get("metrics", ())) if limits else ()
        check_limits(len(scored), "against" in given, metrics=metrics, **limits)
        result = call(**given).to_dict()
    gates = measure_gates(result["models"], **limits)
    result |= {"gates": gates} if gates else {}
    emit(result)
    if output:
        write_json(result, output)
    require(gates)


@cli.command()
@takes(UptrainConfig)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of transformers.TrainingArguments, such as weight_decay=0.05. Repeatable; "
    "docs/options.md lists those that a run honours. [default: none]",
    panel="Training",
)
@common
def uptrain(overrides: tuple[str, ...] = (), **given: Any) -> None:
    """Continue pretraining MODEL into OUT for a fraction of its original budget.

    One of --alpha and --tokens is required. The same command resumes an interrupted run.

    \b
    Examples:
      mha2gqa uptrain CONVERTED OUT --data TEXT.jsonl --alpha 0.05 --original-tokens 2T
      mha2gqa uptrain CONVERTED OUT --data TEXT.jsonl --tokens 100M --train lora
    """
    further = read_sets(overrides)
    for name in given.keys() & further.keys():
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"is given as {flag} too", where=f"--set {name}", fix="leave one out")
    own = {field.name for field in fields(UptrainConfig)}
    passed = {name: value for name, value in further.items() if name not in own}
    UptrainConfig(**given, **{name: further[name] for name in further.keys() & own}, training_args=passed)
    with shown_progress("uptrain"):
        from ..uptraining import uptrain as call

        result = call(**given, **further)
    emit(result)


def _job(command: Any) -> Any:
    """What `run` and `sweep` take: a recipe, overrides, a rehearsal."""
    for decorator in (
        click.option(
            "--force",
            is_flag=True,
            help="Replace checkpoints that another version of the recipe made. [default: off]",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="A.B=C",
            help="Override a key of the recipe, such as uptrain.alpha=0.02. Repeatable. [default: none]",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check everything, run nothing, read no weights. [default: off]"
        ),
        click.argument("recipe", type=click.Path()),
    ):
        command = decorator(command)
    return command


@cli.command()
@_job
@common
def run(recipe: str, overrides: tuple[str, ...], dry_run: bool, force: bool) -> None:
    """Do a whole RECIPE: convert, evaluate, uptrain, evaluate, report. Finished stages are skipped.

    \b
    Examples:
      mha2gqa recipes copy tiny && mha2gqa run tiny.yaml --dry-run
      mha2gqa run recipes/llama-2-7b-gqa8.yaml --set source=MODEL --set uptrain.tokens=100M
    """
    from ..config import load_recipe

    loaded = load_recipe(recipe, overrides)
    with shown_progress("run"):
        from ..commands.run_recipe import run as call

        result = call(loaded, dry_run=dry_run, force=force)
    emit(result)


@cli.command()
@_job
@common
def sweep(recipe: str, overrides: tuple[str, ...], dry_run: bool, force: bool) -> None:
    """Do the grid of a RECIPE's sweep section: one table, one frontier. Finished cells are skipped.

    \b
    Example:
      mha2gqa sweep recipes/paper-groups.yaml --set source=MODEL --set sweep.groups='[8, 4]'
    """
    from ..config import load_recipe

    loaded = load_recipe(recipe, overrides)
    with shown_progress("sweep"):
        from ..commands.sweep import sweep as call

        result = call(loaded, dry_run=dry_run, force=force)
    emit(result)


@cli.command()
@takes(VerifyConfig)
@common
def verify(**given: Any) -> None:
    """Check a converted folder OUT: keys, shapes, config, equivalence. Exit 1 if a check fails.

    \b
    Example:
      mha2gqa verify OUT --against SOURCE --full
    """
    from ..errors import CheckpointError

    with shown_progress("verify") as progress:
        from ..verification.checks import failed
        from ..verification.checks import verify as call

        progress.stage("checking")
        result = call(**given)
    emit(result)
    if broken := failed(result.checks):
        raise CheckpointError(
            f"check failed: {broken}", where=given["out"], fix="convert again from the source"
        )
    if result.unchecked:
        raise CheckpointError(
            f"could not be checked: {'; '.join(result.unchecked)}",
            where=given["out"],
            fix="install what is missing, or check it with its own code",
        )


@cli.command()
@common
def archs() -> None:
    """List architectures: supported, converted to another type, refused and why.

    \b
    Example:
      mha2gqa archs --json
    """
    from ..architectures import list_architectures
    from ..results import headed

    emit(headed("archs", list_architectures()))


@cli.command()
@takes(BenchConfig)
@common
def bench(**given: Any) -> None:
    """Time the decode step that servers run, under the same conditions for all MODELs.

    \b
    Examples:
      mha2gqa bench ORIGINAL CONVERTED --batch 16 --context 4096
      mha2gqa bench A.gguf B.gguf --engine llama.cpp --engine-path llama.cpp/build/bin
    """
    with shown_progress("bench") as progress:
        from ..commands.bench import bench as call

        progress.stage("timing")
        result = call(**given)
    emit(result)


@cli.command()
@takes(ExportConfig)
@common
def export(**given: Any) -> None:
    """Write MODEL in an engine's format by the engine's own converter, and check its tokenizer.

    \b
    Example:
      mha2gqa export CONVERTED OUT --to gguf --precision q8_0
    """
    with shown_progress("export"):
        from ..commands.export import export as call

        result = call(**given)
    emit(result)


@cli.command()
@takes(PushConfig)
@common
def push(**given: Any) -> None:
    """Upload a verified FOLDER to the Hub as ORG/NAME. Never done by any other command.

    \b
    Example:
      mha2gqa push OUT my-org/llama-2-7b-gqa8 --private --dry-run
    """
    with shown_progress("push"):
        from ..commands.push import push as call

        result = call(**given)
    emit(result)


@cli.command()
@takes(DemoConfig)
@common
def demo(**given: Any) -> None:
    """The whole job on an embedded tiny model, offline, in about two minutes.

    \b
    Example:
      mha2gqa demo --groups 2
    """
    with shown_progress("demo"):
        from ..commands.demo import demo as call

        result = call(**given)
    emit(result)


@cli.command()
@common
def env() -> None:
    """Versions and devices, for bug reports.

    \b
    Example:
      mha2gqa env --json
    """
    from ..commands.env import environment

    emit(environment())


cli.add_command(recipes)
cli.add_command(completion)


def main() -> None:
    """Console entry point."""
    atexit.register(gc.freeze)  # the process ends: half a second's search for garbage would help nobody
    run_command(cli)
