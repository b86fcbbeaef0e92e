"""heads.split and heads.unsplit on every kind of extra and layout: exact round trips, and pooling that
keeps the function where the members of a group are identical."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mha2gqa.architectures.spec import AttentionSpec, Geometry, PerHeadParameter, Target
from mha2gqa.heads import expand, neighbours, pool_per_head, split, unsplit

H, K, D, WIDTH = 8, 4, 4, 6


def _tensors(spec: AttentionSpec, kv_heads: int = K) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q_rows = H * D * (2 if spec.gated_query else 1)
    out = {"q.weight": draw(q_rows, WIDTH), "q.bias": draw(q_rows), "o.weight": draw(WIDTH, H * D)}
    for p in "kv":
        out |= {f"{p}.weight": draw(kv_heads * D, WIDTH), f"{p}.bias": draw(kv_heads * D)}
    for extra in spec.per_head:
        count = kv_heads if extra.per == "kv" else H
        if "{head}" in extra.name:
            out |= {extra.name.format(head=h): draw(D) for h in range(count)}
        elif extra.reads_kv:
            out[extra.name] = draw(count, kv_heads * D)
        else:
            out[extra.name] = draw(count * 3, 2) if extra.axis == 0 else draw(2, count * 3)
    return out


SPECS = {
    "plain": AttentionSpec(),
    "gated_query": AttentionSpec(gated_query=True),
    "one_tensor_per_head": AttentionSpec(
        per_head=(
            PerHeadParameter("k.norms.{head}.weight", "kv"),
            PerHeadParameter("q.norms.{head}.weight", "query"),
        )
    ),
    "second_axis": AttentionSpec(
        per_head=(PerHeadParameter("x", "kv", axis=1), PerHeadParameter("y", "query", axis=1))
    ),
    "reads_kv": AttentionSpec(
        per_head=(PerHeadParameter("dt.weight", "kv", reads_kv=True), PerHeadParameter("A", "kv"))
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_split_and_unsplit_are_inverse(name: str) -> None:
    spec = SPECS[name]
    tensors = _tensors(spec)
    back = unsplit(spec, split(spec, Geometry(H, K, D, D), tensors))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_a_gated_query_head_takes_its_own_gate_rows() -> None:
    spec = SPECS["gated_query"]
    tensors = _tensors(spec)
    rows = tensors["q.weight"].view(H, 2, D, WIDTH)
    weights = split(spec, Geometry(H, K, D, D), tensors)
    assert torch.equal(weights.q, rows[:, 0])
    assert torch.equal(weights.query_extras["gate.weight"], rows[:, 1])


def test_a_tensor_that_reads_the_kv_heads_is_summed_over_a_group() -> None:
    spec = SPECS["reads_kv"]
    few = split(spec, Geometry(H, 2, D, D), _tensors(spec, kv_heads=2))
    many = expand(few, K, spec)  # identical heads in each group
    v = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    read_few = torch.einsum("gnkd,kd->gn", few.kv_extras["dt.weight"], v)
    wide = many.kv_extras["dt.weight"]
    read_many = torch.einsum("gnkd,kd->gn", wide, v.repeat_interleave(K // 2, 0))
    assert torch.allclose(read_many, read_few.repeat_interleave(K // 2, 0), atol=1e-6)
    pooled = pool_per_head(spec, many.kv_extras, neighbours(K, 2))
    assert torch.allclose(pooled["dt.weight"], few.kv_extras["dt.weight"], atol=1e-6)
    assert torch.equal(pooled["A"], few.kv_extras["A"])


def test_a_target_layout_applies_only_once_heads_are_shared() -> None:
    """GPTBigCode: [q, k, v] per head as MHA, [q of all; k; v] once there is one KV head."""
    spec = AttentionSpec(q="c", k="c", v="c", layout="per_head", mqa=Target("blocks"))
    tag = torch.arange(H * 3).repeat_interleave(D)[:, None].float()  # row value = 3 * head + kind
    weights = split(spec, Geometry(H, H, D, D), {"qkv.weight": tag, "o.weight": torch.zeros(1, H * D)})
    assert torch.equal(unsplit(spec, weights)["qkv.weight"], tag)
    shared = unsplit(spec, replace(weights, k=weights.k[:1], v=weights.v[:1]))["qkv.weight"]
    assert shared[:, 0].tolist() == [3.0 * h for h in range(H) for _ in range(D)] + [1.0] * D + [2.0] * D


def test_shapes_are_found_without_the_tracing_half_of_torch() -> None:
    """Sums and concatenations on the meta device load hundreds of modules: more than a second of a conversion."""
    code = (
        "from mha2gqa.conversion.plan import plan_conversion\n"
        "from mha2gqa.conversion.rewrite import module_changes\n"
        "base = {'num_attention_heads': 8, 'num_key_value_heads': 8, 'hidden_size': 64, 'num_hidden_layers': 1}\n"
        "import sys\n"
        "for kind, names in (('phi3', {'qkv': 192, 'o': 64}), ('llama', dict.fromkeys('qkvo', 64))):\n"
        "    shapes = {f'model.layers.0.self_attn.{n}_proj.weight': (rows, 64) for n, rows in names.items()}\n"
        "    plan = plan_conversion({'model_type': kind} | base, shapes, 2)\n"
        "    assert module_changes(plan, plan.modules[0], shapes)[0]\n"
        "assert not {'sympy', 'torch._dynamo', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
