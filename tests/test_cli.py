"""The command line: exit codes, one JSON object, one-line errors, and nothing heavy for --help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from launching import BROKEN, CLOSED, started

from mha2gqa.cli import commands
from mha2gqa.cli.exit_codes import run_command
from mha2gqa.errors import GateError, TrainingError

COMMANDS = [
    "archs",
    "bench",
    "completion",
    "convert",
    "demo",
    "env",
    "evaluate",
    "export",
    "plan",
    "push",
    "recipes",
    "run",
    "sweep",
    "uptrain",
    "verify",
]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code, stdout, stderr without lines of progress."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def call(*args: object, code: int | None = None) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_command(commands.cli, [str(arg) for arg in args])
        out, err = capsys.readouterr()
        err = re.sub(r"^\[\d+:\d\d\] .*\n", "", err, flags=re.M)  # progress, which has tests of its own
        found = int(caught.value.code or 0)
        assert code is None or found == code, (found, out, err)
        return found, out, err

    return call


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['mha2gqa', *sys.argv[1:]]\n"
        "from mha2gqa.cli.commands import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'datasets', 'numpy', 'yaml', 'pydantic'} & set(sys.modules)"
    )
    for args in (["--help"], ["convert", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "plan a",
        "convert a b --groups 2",
        "evaluate a --data b",
        "uptrain a b --data c --tokens 9",
        "run RECIPE",
        "sweep RECIPE",
        "verify a",
        "bench a",
        "demo",
    ],
)
def test_something_is_said_before_anything_heavy_is_imported(command: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "source: a\noutput: b\nconvert: {groups: 2}\nevaluate: {data: c}\nsweep: {groups: [2]}\n"
    )
    code = (
        "import os, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers', 'numpy'): sys.stderr.flush(); os._exit(77)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from mha2gqa.cli.commands import main; main()"
    )
    args = command.replace("RECIPE", str(recipe)).split()
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == f"[0:00] {args[0]}: starting\n"


def test_quiet_shows_no_progress(
    pico: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for words, shown in (([], True), (["-q"], False)):
        with pytest.raises(SystemExit) as ended:
            run_command(commands.cli, ["plan", str(pico), *words])
        assert not ended.value.code
        assert bool(capsys.readouterr().err) == shown


def test_every_command_has_help(run: Run) -> None:
    _, listing, _ = run("--help", code=0)
    for name in COMMANDS:
        assert f"│ {name} " in listing
        _, text, _ = run(name, "--help", code=0)
        assert f"mha2gqa {name}" in text.split("Example")[1]
        assert ("--json" in text and "--verbose" in text) or name == "completion"
    assert sorted(commands.cli.commands) == COMMANDS


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    _, out, err = run(code=2)
    assert "Usage: mha2gqa" in out + err and "╭─ Steps " in out + err and "error" not in out + err


@pytest.mark.parametrize(
    ("command", "first", "panels"),
    [
        ("convert", ["--groups", "--method", "--calibration"], ["What", "Calibration", "Output", "Advanced"]),
        ("evaluate", ["--data", "--protocol", "--against"], ["What", "Output", "Gates", "Advanced"]),
        ("uptrain", ["--data", "--alpha", "--original-tokens"], ["What", "Teacher", "Training", "Output"]),
    ],
)
def test_help_shows_what_matters_first_in_panels_and_every_default(
    run: Run, command: str, first: list[str], panels: list[str]
) -> None:
    _, text, _ = run(command, "--help", code=0)
    places = [text.index(f"─ {panel} ─") for panel in panels]
    assert places == sorted(places)
    assert re.findall(r"│ \*? *(--[a-z-]+)", text)[:3] == first
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    options = [p for p in commands.cli.commands[command].params if isinstance(p, click.Option)]
    for option in options:
        if option.name not in ("help", "json", "verbose", "quiet") and not option.required:
            assert "default: " in (option.help or ""), option.name
    assert "[default: joint]" in shown or command != "convert"
    assert "One of --alpha and --tokens is required." in shown or command != "uptrain"


@pytest.mark.parametrize(
    "typed",
    [
        ["--fit", "steps=2000", "patience=12"],
        ["--fit", "steps=2000 patience=12"],
        ["--fit", "steps=2000", "--fit", "patience=12"],
        ["--fit=steps=2000", "--fit", "patience=12"],
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_pairs_of_fit_may_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], first: bool
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("mha2gqa.conversion.checkpoint.convert", lambda **given: seen.update(given) or {})
    monkeypatch.setattr(commands, "emit", lambda result: None)
    places, more = ["MODEL", "OUT"], ["--groups", "2", "--calibration", "t.jsonl"]
    args = [*typed, *more, *places] if first else [*places, *more, *typed]
    CliRunner().invoke(commands.cli, ["convert", *args], catch_exceptions=False)
    assert (seen["source"], seen["out"]) == ("MODEL", "OUT")
    assert (seen["fit"].steps, seen["fit"].patience) == (2000, 12)


def test_fit_help_needs_nothing_else(run: Run) -> None:
    _, out, _ = run("convert", "--fit", "help", code=0)
    assert "holdout" in out and "> 0 and < 1" in out


def test_recipes_are_listed_and_copied(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = json.loads(run("recipes", "--json", code=0)[1])["recipes"]
    top = Path(__file__).parents[1] / "recipes"
    assert [row["name"] for row in listed] == sorted(path.stem for path in top.glob("*.yaml"))
    assert "mha2gqa recipes copy" in run("recipes", code=0)[1]
    run("recipes", "copy", "tiny", code=0)
    assert (tmp_path / "tiny.yaml").read_text() == (top / "tiny.yaml").read_text()
    assert "exists already" in run("recipes", "copy", "tiny", code=2)[2]
    run("recipes", "copy", "tiny", "--force", code=0)
    assert "choose one of" in run("recipes", "copy", "nosuch", code=2)[2]
    assert json.loads(run("recipes", "schema", code=0)[1])["title"] == "mha2gqa recipe"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    assert "_MHA2GQA_COMPLETE" in run("completion", shell, code=0)[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mha2gqa ev", "evaluate"),
        ("mha2gqa convert --met", "--method"),
        ("mha2gqa convert --method jo", "joint"),
    ],
)
def test_the_shell_completes(words: str, expected: str) -> None:
    env = os.environ | {
        "_MHA2GQA_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = "from mha2gqa.cli.commands import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert f"plain,{expected}" in done.stdout.splitlines(), done


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nosuch", "./nosuch: no such folder"),
        ("nosuch/", "no such folder"),
        ("a/b/c", "no such folder"),
        ("../x.safetensors", "no such folder"),
        ("nosuch", "neither a local folder nor a Hub model in the cache, and HF_HUB_OFFLINE is set"),
        ("org/nosuch", "HF_HUB_OFFLINE is set"),
    ],
)
@pytest.mark.parametrize("command", ["plan {}", "convert {} out --groups 2"])
def test_what_looks_like_a_path_is_judged_as_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, source: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in run(*command.format(source).split(), code=1)[2]


def test_without_a_network_that_is_said_after_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from mha2gqa.checkpoints import hub
    from mha2gqa.errors import CheckpointError

    tries: list[object] = []

    def refuse(place: object, timeout: float) -> None:
        tries.append(place)
        raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "create_connection", refuse)
    for name in hub._PROXIES:
        monkeypatch.delenv(name, raising=False)
    hub.reachable.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
                hub.check_hub_name("org/nosuch")
    finally:
        hub.reachable.cache_clear()
    assert tries == [("huggingface.co", 443)]


def test_plan_json_is_one_object(run: Run, pico: Path) -> None:
    _, out, _ = run("plan", pico, "--groups", 2, "--tp", 4, "--json", code=0)
    data = json.loads(out)
    assert data["schema_version"] == 1 and data["command"] == "plan" and "torch" in data["versions"]
    assert data["valid_groups"] == [1, 2, 4, 8] and data["num_kv_heads"] == {"before": 8, "after": 2}
    assert data["kv_bytes_per_token"] == {"before": 2 * 8 * 4 * 2 * 4, "after": 2 * 2 * 4 * 2 * 4}
    assert "stores each of 2 KV heads 2 times" in data["warnings"][-1]
    assert "MiB" in run("plan", pico, code=0)[1]


@pytest.mark.parametrize("flag", ["--groups", "--kv-heads"])
def test_convert_and_verify(run: Run, pico: Path, tmp_path: Path, flag: str) -> None:
    _, out, _ = run("convert", pico, tmp_path / "out", flag, 2, "--method", "mean", "--json", code=0)
    assert json.loads(out)["num_kv_heads"] == {"before": 8, "after": 2}
    _, out, _ = run("--json", "verify", tmp_path / "out", "--against", pico, code=0)
    assert all(check["ok"] is not False for check in json.loads(out)["checks"])
    assert run("convert", pico, tmp_path / "out", flag, 2, code=2)[2].startswith("error: ")
    _, out, _ = run("convert", pico, tmp_path / "out", flag, 4, "--force", code=0)
    assert "8 KV heads -> 4" in out and "FAILED" not in out


def test_a_failed_check_exits_with_1_after_its_one_json_object(run: Run, pico: Path) -> None:
    (pico / "model.safetensors").write_bytes(b"broken")
    _, out, err = run("verify", pico, "--json", code=1)
    assert any(check["ok"] is False for check in json.loads(out)["checks"]) and "check failed" in err


@pytest.mark.parametrize("value", ["3", "0", "-1", "2.5", "16", "two", "0.25"])
def test_impossible_groups_list_the_valid_values(run: Run, pico: Path, tmp_path: Path, value: str) -> None:
    _, out, err = run("convert", pico, tmp_path / "out", f"--groups={value}", code=2)
    assert err.count("\n") == 1 and "1, 2, 4, 8" in err and "--groups" in err and not out
    assert list(tmp_path.iterdir()) == [pico]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nonsense"], 2, "nonsense"),
        (["convert", "a"], 2, "Missing argument 'OUT'"),
        (["convert", "a", "b"], 2, "--groups"),
        (["plan", "a", "--batch", "0"], 2, "--batch"),
        (["plan", "a", "--context", "many"], 2, "must be a whole number"),
        (["plan", "a", "--gpu-memory", "big"], 2, "must be a size"),
        (["convert", "./nowhere", "out", "--groups", "2"], 1, "./nowhere: no such folder"),
        (["run", "nowhere.yaml"], 2, "nowhere.yaml: cannot be read"),
        (["sweep", "nowhere.yaml"], 2, "nowhere.yaml: cannot be read"),
        (["uptrain", "a", "b", "--data", "c", "--set", "alhpa=1"], 2, "did you mean alpha?"),
        (["uptrain", "a", "b", "--data", "c", "--set", "x"], 2, "--set x: is not KEY=VALUE"),
        (["evaluate", "a", "b", "--data", "c", "--max-ppl-ratio", "-1"], 2, "'--max-ppl-ratio': must be > 0"),
        (
            ["evaluate", "a", "b", "--data", "c", "--min-agreement", "0.9"],
            2,
            "name the original with --against",
        ),
        (["evaluate", "a", "--data", "c", "--fail-if-worse"], 2, "a gate needs two models"),
        (["evaluate", "a", "--data", "c", "--output", "no/x.json"], 2, "there is no folder no"),
        (["evaluate", "a", "--data", "c", "--output", "."], 2, "is a folder"),
        (["bench", "a", "--context", "0"], 2, "'--context': must be >= 1"),
        (["bench", "a", "--new-tokens", "0"], 2, "'--new-tokens': must be >= 1"),
        (["plan", "a", "--context", "0"], 2, "'--context': must be > 0"),
        (["push", "./nowhere", "a/b"], 2, "no mha2gqa.json"),
    ],
)
def test_errors_are_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, err = run(*args, code=code)
    assert words in err and err.startswith("error: ") and err.count("\n") == 1 and not out
    _, out, err = run(*args, "--json", code=code)
    error = json.loads(out)
    assert (
        error["command"] == args[0]
        and error["error"]["exit_code"] == code
        and words in error["error"]["message"]
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_any_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("RANK", raising=False)
    cleared: list[str] = []

    @click.command()
    @commands.common
    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)  # as long as the signal needs to arrive
        finally:
            cleared.append("what was half made")

    with pytest.raises(SystemExit) as caught:
        run_command(click.Group(commands={"work": work}), ["work"])
    assert (caught.value.code, cleared) == (130, ["what was half made"])
    assert capsys.readouterr().err.strip() == "mha2gqa: interrupted"
    assert signal.getsignal(number) is signal.SIG_DFL


def command_that_raises(error: BaseException) -> click.Group:
    @click.group()
    @commands.common
    def group() -> None:
        pass

    @group.command()
    @commands.common
    def fail() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TrainingError("the loss is not finite", where="step 3"), 1, "error: step 3: the loss is not finite"),
        (GateError("too far"), 3, "error: too far"),
        (KeyboardInterrupt(), 130, "mha2gqa: interrupted"),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(error), ["fail"])
    assert caught.value.code == code
    err = capsys.readouterr().err.strip()
    assert err == words and "Traceback" not in err
    with pytest.raises(SystemExit):
        run_command(command_that_raises(error), ["fail", "-v"])
    if code != 130:
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "variable", "traceback"), [([], "", False), (["-v"], "", True), ([], "1", True)]
)
def test_unexpected_faults_are_one_line_too(args: list[str], variable: str, traceback: bool) -> None:
    code = (
        "import click, mha2gqa.cli.commands as c; from mha2gqa.cli.exit_codes import run_command\n"
        "@c.cli.command()\n@c.common\ndef fail(): raise TypeError('two\\nlines')\n"
        f"run_command(c.cli, ['fail', *{args}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"MHA2GQA_DEBUG": variable, "PATH": ""},
    )
    assert done.returncode == 1 and not done.stdout
    assert "error: TypeError: two lines (-v shows where)" in done.stderr.splitlines()
    assert ("Traceback" in done.stderr) == traceback


@pytest.mark.parametrize("stderr", ["/dev/full", CLOSED, BROKEN])
def test_a_log_that_cannot_be_written_ends_no_work(stderr: str, pico: Path, tmp_path: Path) -> None:
    words = ["-m", "mha2gqa", "convert", str(pico), str(tmp_path / "out"), "--groups", "4", "--json"]
    done = started(words, tmp_path, stderr=stderr)
    assert done.code == 0 and json.loads(done.stdout)["num_kv_heads"] == {"before": 8, "after": 4}
    again = started(words, tmp_path, stderr=stderr)
    assert again.code == 2 and json.loads(again.stdout)["error"]["exit_code"] == 2


def test_logs_go_to_stderr(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    _, out, err = run("env", "--json", code=0)
    assert json.loads(out)["command"] == "env" and not err


def test_other_ranks_are_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run("env", code=0)[1] == ""


def test_gates() -> None:
    from mha2gqa.evaluation.gates import measure_gates as check_gates
    from mha2gqa.evaluation.gates import perplexity_ratio, require

    rows: list[dict[str, Any]] = [
        {"path": "a", "loss": 3.0, "bits_per_byte": 1.2, "tokens": 10, "bytes": 36},
        {"path": "b", "loss": 3.1, "bits_per_byte": 1.24, "tokens": 10, "top1_agreement": 0.9},
    ]
    assert perplexity_ratio(rows[1], rows[0]) == pytest.approx(1.1051709)
    # Another tokenizer: half the tokens, same bits/byte, must be the same quality.
    other = {"path": "c", "loss": 6.0, "bits_per_byte": 1.2, "tokens": 5}
    assert perplexity_ratio(other, rows[0]) == pytest.approx(1.0)
    assert perplexity_ratio({**rows[1], "loss": float("inf")}, rows[0]) == float("inf")
    require(check_gates(rows, max_ppl_ratio=1.2, min_agreement=0.8))
    with pytest.raises(GateError, match=r"b: max_ppl_ratio 1.105171 against 1.02; b: fail_if_worse"):
        require(check_gates(rows, max_ppl_ratio=1.02, fail_if_worse=True))
    with pytest.raises(GateError, match=r"min_agreement 0.9 against 0.95"):
        require(check_gates(rows, min_agreement=0.95))
    assert check_gates(rows[:1]) == []


def test_archs_lists_every_type_with_its_fate() -> None:
    code = (
        "import sys; from mha2gqa.cli.commands import main; sys.argv = ['mha2gqa', '--json', 'archs']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["command"], found["schema_version"]) == ("archs", 1)
    assert {"model_type": "llama", "proven": "forward"} in found["supported"]
    assert all(row["reason"] for row in found["refused"])
    refused = {row["model_type"] for row in found["refused"]}
    assert {"deepseek_v3", "mamba", "jetmoe"} <= refused
    assert not refused & {row["model_type"] for row in found["supported"]}


@pytest.mark.parametrize("error", [None, TrainingError("diverged")])
def test_a_finished_command_leaves_its_process_group_and_a_failed_one_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TrainingError | None
) -> None:
    distributed = pytest.importorskip("torch").distributed
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(command_that_raises(error) if error else commands.cli, ["fail" if error else "archs"])
        assert (caught.value.code, distributed.is_initialized()) == ((1, True) if error else (0, False))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_only_the_first_process_says_what_all_meet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("mha2gqa.cli.exit_codes.time.sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    first = run("verify", "nowhere", "--json", code=1)
    assert first[2].startswith("error: nowhere: ") and not waited
    monkeypatch.setenv("RANK", "1")
    other = run("verify", "nowhere", "--json", code=1)
    # It lives on only where the first process did not fail: then this line is the only one.
    assert other[1:] == ("", first[2].replace("error:", "error (process 1):")) and waited == [10.0]


def test_an_interruption_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(KeyboardInterrupt()), ["fail"])
    assert (caught.value.code, "".join(capsys.readouterr()).strip()) == (130, "")  # click ends the line
