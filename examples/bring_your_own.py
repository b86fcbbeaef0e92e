"""Convert a model of your own: a hand-written attention that no library knows.

    python examples/bring_your_own.py

Its projections are called `q_linear`, `k_linear`, `v_linear` and `o_linear`. One `AttentionSpec` says so,
`convert_state_dict` does the rest, and the class needs nothing but a `num_kv_heads` argument.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha2gqa.architectures import AttentionSpec
from mha2gqa.conversion.checkpoint import convert_state_dict


class Attention(nn.Module):
    """Causal attention without positions; `num_kv_heads` key/value heads serve `num_heads` queries."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        head_dim = hidden // num_heads
        self.q_linear = nn.Linear(hidden, num_heads * head_dim)
        self.k_linear = nn.Linear(hidden, num_kv_heads * head_dim)
        self.v_linear = nn.Linear(hidden, num_kv_heads * head_dim)
        self.o_linear = nn.Linear(num_heads * head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        q = self.q_linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, d]
        k = self.k_linear(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)  # [B, G, T, d]
        v = self.v_linear(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_linear(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Embedding, residual attention blocks, head."""

    def __init__(self, num_kv_heads: int, layers: int = 2, hidden: int = 64, num_heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, hidden)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(hidden), "attn": Attention(hidden, num_heads, num_kv_heads)})
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, 100)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, 100]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
        return self.head(x)


# Where the attention is and what may be done to it. No position enters the keys, so they may be mixed freely.
SPEC = AttentionSpec(
    modules=(("self", "blocks.{layer}.attn"),),
    q="q_linear",
    k="k_linear",
    v="v_linear",
    o="o_linear",
    position="none",
    key_symmetry="linear",
)


def main() -> None:
    """Convert 8 KV heads to 2 by two methods and compare the logits."""
    torch.manual_seed(0)
    original = Model(num_kv_heads=8).eval()
    ids = torch.randint(100, (4, 32))
    for method in ("mean", "joint"):
        state = convert_state_dict(original.state_dict(), SPEC, 2, num_heads=8, method=method)
        converted = Model(num_kv_heads=2).eval()
        converted.load_state_dict(state)  # strict: every name and shape is as the class expects
        with torch.no_grad():
            before, after = original(ids), converted(ids)
        change = (after - before).norm() / before.norm()
        parameters = sum(p.numel() for p in converted.parameters())
        print(f"{method}: {parameters} parameters, logits changed by {change:.1%}")


if __name__ == "__main__":
    main()
