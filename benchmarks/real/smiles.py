"""Molecules that ANNalog samples, starting from well-known drugs: sources to calibrate and to score on.

python benchmarks/real/smiles.py WORK [--count 1000] [--held-out 200]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

DRUGS = [
    "CC(=O)Oc1ccccc1C(=O)O",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "CC(=O)Nc1ccc(O)cc1",
    "COc1ccc2[nH]c(nc2c1)S(=O)Cc1ncc(C)c(OC)c1C",
    "CC(C)NCC(O)COc1ccc(CC(N)=O)cc1",
    "CN1CCC[C@H]1c1cccnc1",
    "O=C1NC(=O)C(c2ccccc2)(c2ccccc2)N1",
    "CN1c2ccc(Cl)cc2C(=NCC1=O)c1ccccc1",
    "CCN(CC)CC(=O)Nc1c(C)cccc1C",
    "NC(=O)c1cnccn1",
    "CC(C)(C)NCC(O)c1ccc(O)c(CO)c1",
    "OC(=O)Cc1ccccc1Nc1c(Cl)cccc1Cl",
    "CNCCC(Oc1ccc(cc1)C(F)(F)F)c1ccccc1",
    "NS(=O)(=O)c1cc(C(=O)O)c(NCc2ccco2)cc1Cl",
    "O=C(O)c1cn(C2CC2)c2cc(N3CCNCC3)c(F)cc2c1=O",
]
AT_ONCE = 64


@torch.inference_mode()
def sampled(model: torch.nn.Module, tokenizer: object, count: int, seed: int) -> list[str]:
    """Different molecules: samples for the drugs, then samples for samples."""
    torch.manual_seed(seed)
    random.seed(seed)
    found = dict.fromkeys(DRUGS)
    while len(found) < count:
        asked = random.sample(list(found), min(AT_ONCE, len(found)))
        batch = tokenizer(asked, return_tensors="pt", padding=True).to(model.device)  # type: ignore[operator]
        ids = model.generate(  # type: ignore[operator]
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            top_k=0,
            num_return_sequences=2,
            max_length=100,
        )
        found |= dict.fromkeys(filter(None, tokenizer.batch_decode(ids, skip_special_tokens=True)))  # type: ignore[attr-defined]
    return list(found)[:count]


def main() -> None:
    """Write WORK/smiles/calibration.jsonl and WORK/smiles/held_out.jsonl, column `source`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=200)
    given = parser.parse_args()
    path, folder = given.work / "models" / "annalog", given.work / "smiles"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    model = model.to(device)
    found = sampled(model, tokenizer, given.count + given.held_out, 0)
    random.Random(0).shuffle(found)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"held_out": found[: given.held_out], "calibration": found[given.held_out :]}
    for name, texts in parts.items():
        lines = "".join(json.dumps({"source": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
        print(f"{name}: {len(texts)}")


if __name__ == "__main__":
    main()
