"""What the pages of speech and translation say beside their blocks: every option that they name is used in a command.

Commands run in order in a folder as `test_docs.py` makes it, on pico models.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from families import stock_model
from seq2seq_models import audio_folder, saved, saved_moonshine, saved_nllb, saved_whisper
from test_docs import ROOT, blocks, cli, encoder_decoder
from training import write_text

COMMANDS = {
    "speech": """
        plan MOONSHINE
        convert MOONSHINE moonshine-gqa --groups 2 --calibration RECORDINGS --targets generate --no-reconstruct
        evaluate MOONSHINE moonshine-gqa --data HELDOUT_RECORDINGS --metrics wer --retry-temperatures 0.2,1.0
        convert WHISPER named --groups 2 --calibration NAMED.jsonl --source-column sound --target-column said --calibration-tokens 40 --no-reconstruct
        convert MULTILINGUAL german --groups 2 --calibration SOUNDS --targets generate --beams 5 --source-lang de --task translate --no-reconstruct
        evaluate MULTILINGUAL german --data HELDOUT_RECORDINGS --metrics cer --source-lang German --task translate --max-wer-delta 1000 --metrics wer
        uptrain named named-up --data RECORDINGS --tokens 60 --batch-tokens 20 --learning-rate 1e-5 --set ce_weight=0.5
        verify named-up
        plan MUSICGEN_MELODY
        convert MUSICGEN_MELODY melody-gqa --groups 2
        verify melody-gqa --against MUSICGEN_MELODY --full
        convert MOONSHINE_STREAMING streaming-gqa --groups 2
        verify streaming-gqa --against MOONSHINE_STREAMING --full
    """,
    "translation": """
        plan NLLB
        convert NLLB nllb-gqa --groups 2 --calibration NAMED.jsonl --source-lang eng_Latn --target-lang deu_Latn --source-column en --target-column translation.de --no-reconstruct
        evaluate NLLB nllb-gqa --data PAIRS.jsonl --source-lang eng_Latn --target-lang deu_Latn --metrics bleu --max-bleu-drop 100
        uptrain nllb-gqa nllb-up --data PAIRS.jsonl --source-lang eng_Latn --target-lang deu_Latn --alpha 0.5 --original-tokens 400 --train lora
        convert TRANSLATOR written --groups 2 --calibration SOURCES.jsonl --targets generate --beams 4 --no-reconstruct
        convert T5 t5-pairs --groups 2 --calibration PAIRS.jsonl --source-prefix 'translate w1 to w2: ' --no-reconstruct
        evaluate T5 t5-pairs --data HELDOUT_PAIRS.jsonl --source-prefix 'translate w1 to w2: '
    """,
}
# Named to say that they are refused.
REFUSED = {
    "translation": {"--window": "uptrain written window-up --data PAIRS.jsonl --tokens 100 --window 64"}
}
# T5's own objective is run in test_seq2seq.py.
ELSEWHERE = {"translation": {"--objective"}, "speech": set()}


def everything(folder: Path, page: str) -> None:
    """The models and data of both lists of commands."""
    encoder_decoder(folder, page)
    if page == "speech":
        saved_moonshine(folder / "MOONSHINE")
        saved_whisper(folder / "MULTILINGUAL", multilingual=True)
        for name in ("musicgen_melody", "moonshine_streaming"):
            stock_model(name).save_pretrained(folder / name.upper())
        audio_folder(folder / "SOUNDS", ["w1"] * 4)
        (folder / "SOUNDS" / "metadata.csv").unlink()
        rows = [{"sound": f"RECORDINGS/a{i}.wav", "said": f"w{i} w{i + 1} w3 w4"} for i in range(6)]
    else:
        saved_nllb(folder / "NLLB")
        saved(folder / "T5", "t5")
        rows = [{"en": f"w{i} w2", "translation": {"de": f"w{i} w{i + 1} w4"}} for i in range(12)]
        sources = [json.dumps({"text": f"w{i} w{i + 2} w3"}) + "\n" for i in range(12)]
        (folder / "SOURCES.jsonl").write_text("".join(sources))
    (folder / "NAMED.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "TEXT.jsonl", 70)


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("page", COMMANDS)
def test_options_of_the_page_are_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in COMMANDS[page].splitlines() if line.strip()]
    for line in lines:
        cli.main(shlex.split(line), prog_name="mha2gqa", standalone_mode=False, obj={})
    for option, line in REFUSED.get(page, {}).items():
        with pytest.raises(Exception, match=option.strip("-")):
            cli.main(shlex.split(line), prog_name="mha2gqa", standalone_mode=False, obj={})
    file = ROOT / "docs" / f"{page}.md"
    run = options(" ".join([*lines, *(block.body for block in blocks(file, "sh"))]))
    assert options(file.read_text(encoding="utf-8")) <= run | REFUSED.get(page, {}).keys() | ELSEWHERE[page]
