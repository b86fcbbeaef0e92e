"""Whether an engine's tokenizer gives the token ids that the checkpoint's gives, line by line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..assets import heldout_path
from ..checkpoints.loading import load_tokenizer
from ..errors import first_line
from ..results import Check

LINES = 100


def sample_lines(text: str | Path | None = None) -> list[str]:
    """A hundred lines to tokenize: of a file, or of the text that comes with the package."""
    path = Path(text) if text else heldout_path()
    with path.open(encoding="utf-8") as file:
        raw = [line for _, line in zip(range(4 * LINES), file, strict=False)]
    if path.suffix == ".jsonl":
        raw = [part for line in raw for part in json.loads(line)["text"].splitlines()]
    return [line.rstrip("\n") for line in raw if line.strip()][:LINES]


def compare(source: Path, lines: list[str], read: Callable[[str], list[int]]) -> Check:
    """Token ids of the engine beside those of the checkpoint's tokenizer, without special tokens."""
    tokenizer = load_tokenizer(source)
    for line in lines:
        right, got = tokenizer(line, add_special_tokens=False)["input_ids"], read(line)
        if list(got) != list(right):
            return Check(
                "tokenizer", False, f"the engine reads {line[:60]!r} as other tokens than the checkpoint"
            )
    return Check("tokenizer", True, f"{len(lines)} lines read alike")


def check_gguf(file: Path, source: Path, lines: list[str]) -> Check:
    """Ask llama.cpp, through whichever of its Python bindings is installed."""
    if importlib.util.find_spec("xllamacpp") is not None:
        code = (
            "import json, sys, urllib.request, os\n"
            "from xllamacpp import CommonParams, Server\n"
            "p = CommonParams(); p.model.path = sys.argv[1]; p.n_ctx = 64; p.n_parallel = 1; p.warmup = False\n"
            "s = Server(p); out = []\n"
            "for line in json.loads(sys.stdin.read()):\n"
            "    body = json.dumps({'content': line, 'add_special': False}).encode()\n"
            "    ask = urllib.request.Request(s.listening_address + '/tokenize', body, "
            "{'Content-Type': 'application/json'})\n"
            "    out.append(json.loads(urllib.request.urlopen(ask, timeout=60).read())['tokens'])\n"
            "print('\\n' + json.dumps(out), flush=True); os._exit(0)"
        )
    elif importlib.util.find_spec("llama_cpp") is not None:
        code = (
            "import json, sys\nfrom llama_cpp import Llama\n"
            "m = Llama(sys.argv[1], vocab_only=True, verbose=False)\n"
            "print('\\n' + json.dumps([m.tokenize(x.encode(), add_bos=False, special=True) "
            "for x in json.loads(sys.stdin.read())]))"
        )
    else:
        return Check("tokenizer", None, "not checked: pip install xllamacpp (or llama-cpp-python)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], input=json.dumps(lines), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check("tokenizer", False, f"llama.cpp cannot load the result: {last}")
    found = dict(zip(lines, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))
    return compare(source, lines, found.__getitem__)


def check_ct2(folder: Path, source: Path, lines: list[str]) -> Check:
    """CTranslate2 takes token strings: the place of each in its vocabulary must be the token's number."""
    vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    place = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = load_tokenizer(source)

    def read(line: str) -> list[int]:
        return [place.get(token, -1) for token in tokenizer.tokenize(line)]

    return compare(source, lines, read)


def check_onnx(folder: Path, source: Path, lines: list[str]) -> Check:
    """Ask onnxruntime-genai, which loads the model for it."""
    import onnxruntime_genai as engine

    try:
        tokenizer = engine.Tokenizer(engine.Model(str(folder)))
    except Exception as error:  # their bindings raise what they like; without it text cannot be served
        return Check("tokenizer", False, f"onnxruntime-genai cannot load it: {first_line(error)}")
    return compare(source, lines, lambda line: list(map(int, tokenizer.encode(line))))
