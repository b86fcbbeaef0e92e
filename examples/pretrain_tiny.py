"""Train the tiny MHA Llama that the package embeds, from the text of the running Python's standard library.

    python examples/pretrain_tiny.py --out tiny-llama                      # about two minutes on a GPU
    python examples/pretrain_tiny.py --out tiny-llama --steps 20 --batch 8  # a try on a CPU

Everything comes from this one script: the corpus (sources that every Python carries, one file in forty held
out by the hash of its name), the byte-level BPE tokenizer, the weights (bf16), the held-out text the demo
is judged on, and `train.json`, which records how the folder was made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers

from mha2gqa.assets import is_heldout, stdlib_documents

EOS = "<|endoftext|>"
HELDOUT_BYTES = 300_000  # at most, so that the package stays small


def within(texts: list[tuple[str, str]], limit: int) -> list[tuple[str, str]]:
    """The (source, text) pairs, in order, that fit into `limit` bytes of JSONL together."""
    kept, size = [], 0
    for source, text in texts:
        line = len(json.dumps({"source": source, "text": text}).encode()) + 1
        if size + line <= limit:
            kept.append((source, text))
            size += line
    return kept


def read_corpus(limit: int | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Training texts (`limit` bytes of them), and held-out (source, text) pairs up to `HELDOUT_BYTES`."""
    documents = list(stdlib_documents())
    train = [item for item in documents if not is_heldout(item[0])]
    seen = {text for _, text in train}
    held = [item for item in documents if is_heldout(item[0]) and item[1] not in seen]
    held.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    if limit is not None:
        train, held = within(train, limit), within(held, limit // 10)
    return [text for _, text in train], within(held, HELDOUT_BYTES)


def train_tokenizer(texts: list[str], vocab: int) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`; id 0 is the end-of-text token, no text is unencodable."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: transformers.PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts, each followed by the end-of-text token, as one stream of ids [N]."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])


def blocks(stream: torch.Tensor, window: int, offset: int = 0) -> torch.Tensor:
    """Rows [N, window + 1] of the stream; a row's last id is the next one's first."""
    return stream[offset:].unfold(0, window + 1, window)


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, rows: torch.Tensor, batch: int) -> float:
    """Nats per token over rows [N, window + 1], every position scored."""
    model.eval()
    total = 0.0
    for part in rows.split(batch):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / rows[:, 1:].numel()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up, constant, then a linear decay to 2 % over the last 40 %."""
    warm = max(1, min(100, steps // 10))
    decay = int(steps * 0.6)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (1 - 0.98 * max(0, step - decay) / max(1, steps - decay))


def build_model(args: argparse.Namespace) -> transformers.LlamaForCausalLM:
    """A Llama with as many KV heads as query heads."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            max_position_embeddings=2 * args.window,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


def train(
    model: torch.nn.Module, stream: torch.Tensor, heldout: torch.Tensor, args: argparse.Namespace
) -> list[list[float]]:
    """Train in place; returns the curve as [step, training loss, held-out loss]."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(args.seed)
    order, epoch, curve = torch.empty(0, dtype=torch.long), stream[:0], []
    began = time.monotonic()
    for step in range(args.steps):
        if len(order) < args.batch:  # a new pass: another cut of the stream, another order
            epoch = blocks(stream, args.window, int(torch.randint(args.window, (), generator=generator)))
            order = torch.randperm(len(epoch), generator=generator)
        picked, order = order[: args.batch], order[args.batch :]
        rows = epoch[picked.to(stream.device)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, args.steps // 10) == 0:
            held = heldout_loss(model, heldout[: args.eval_rows], args.batch)
            curve.append([step + 1, round(loss.item(), 4), round(held, 4)])
            seconds = time.monotonic() - began
            print(
                f"step {step + 1}: loss {loss.item():.3f}, held-out {held:.3f}, {seconds:.0f} s", flush=True
            )
    return curve


def parse_args() -> argparse.Namespace:
    """Options; the defaults make the embedded model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=32, help="rows of --window tokens a step")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=352)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--limit", type=int, help="train on this many bytes only (a quick try)")
    parser.add_argument("--eval-rows", type=int, default=64, help="held-out rows looked at while training")
    return parser.parse_args()


def main() -> None:
    """Read, tokenize, train, save."""
    args = parse_args()
    began = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    texts, held = read_corpus(args.limit)
    tokenizer = train_tokenizer(texts, args.vocab)
    stream = encode(tokenizer, texts).to(args.device)
    heldout = blocks(encode(tokenizer, [text for _, text in held]), args.window).to(args.device)
    print(f"{len(texts)} files, {len(stream)} tokens; held out {len(held)} files, {heldout.numel()} tokens")
    model = build_model(args).to(args.device).train()
    curve = train(model, stream, heldout, args)

    model = model.to(torch.bfloat16)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    with (args.out / "heldout.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"source": s, "text": t}) + "\n" for s, t in held)
    (args.out / "model.safetensors").chmod(0o644)  # safetensors writes it for the owner only
    loss = heldout_loss(model.float(), heldout, args.batch)  # of the weights as saved
    cuda = args.device.startswith("cuda")
    record: dict[str, Any] = {
        "made_by": "examples/pretrain_tiny.py",
        "options": {k: v for k, v in vars(args).items() if k not in ("out", "device")},
        "corpus": "standard library of the Python named here, tests and tools left out",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "hardware": torch.cuda.get_device_name(args.device) if cuda else platform.processor() or "CPU",
        "files": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "corpus_tokens": len(stream),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": args.steps * args.batch * args.window,
        "heldout_files": [source for source, _ in held],
        "heldout_loss": round(loss, 4),
        "heldout_loss_is": f"nats per token, protocol blocks, window {args.window}",
        "seconds": round(time.monotonic() - began, 1),
        "curve": curve,
    }
    (args.out / "train.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}; {size / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
