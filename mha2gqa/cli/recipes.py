"""`mha2gqa recipes` and `mha2gqa completion`: recipes of the package, their JSON schema, completion for shells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich_click as click

from ..assets import recipe_paths
from ..checkpoints.atomic import write_text
from ..errors import UsageError
from .options import common
from .printing import emit

SHELLS = ("bash", "zsh", "fish")


@click.group(invoke_without_command=True)
@common
@click.pass_context
def recipes(context: click.Context) -> None:
    """List the recipes of the package; `copy` one to change it, `schema` for editors.

    \b
    Examples:
      mha2gqa recipes
      mha2gqa recipes copy tiny && mha2gqa run tiny.yaml --dry-run
      mha2gqa recipes schema > recipe.schema.json
    """
    if context.invoked_subcommand is not None:
        return
    from ..config import load_recipe
    from ..results import headed

    listed = [
        {"name": name, "description": load_recipe(path).description, "path": str(path)}
        for name, path in recipe_paths().items()
    ]
    width = max(len(row["name"]) for row in listed)
    lines = [f"{row['name']:{width}}  {row['description']}" for row in listed]
    text = "\n".join([*lines, "", "Next: mha2gqa recipes copy NAME"])
    emit(headed("recipes", {"recipes": listed}), text)


@recipes.command()
@click.argument("name")
@click.option("--out", metavar="FILE", help="Where to write it. [default: NAME.yaml here]")
@click.option("--force", is_flag=True, help="Replace that file. [default: off]")
@common
def copy(name: str, out: str | None, force: bool) -> None:
    """Write the recipe NAME to a file of your own.

    \b
    Example:
      mha2gqa recipes copy llama-2-7b-gqa8 --out mine.yaml
    """
    known = recipe_paths()
    if name.removesuffix(".yaml") not in known:
        raise UsageError("no such recipe", where=name, fix=f"choose one of {', '.join(known)}")
    source = known[name.removesuffix(".yaml")]
    target = Path(out or source.name)
    if target.exists() and not force:
        raise UsageError("exists already", where=target, fix="give --out, or --force to replace it")
    text = source.read_text(encoding="utf-8")
    write_text(target, text)
    from ..results import headed

    emit(headed("recipes copy", {"output": str(target)}), f"{target}\nNext: mha2gqa run {target} --dry-run")


@recipes.command()
@common
def schema() -> None:
    """Print the JSON schema of recipes, which editors check YAML with.

    \b
    Example:
      mha2gqa recipes schema > recipe.schema.json    # then in a recipe: # yaml-language-server: $schema=…
    """
    from ..config.schema import recipe_schema

    click.echo(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and choices in SHELL.

    \b
    Examples:
      mha2gqa completion bash >> ~/.bashrc
      mha2gqa completion zsh >> ~/.zshrc
      mha2gqa completion fish > ~/.config/fish/completions/mha2gqa.fish
    """
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    root = context.find_root().command
    click.echo(kind(root, {}, "mha2gqa", "_MHA2GQA_COMPLETE").source())
