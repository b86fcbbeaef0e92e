"""What it takes to call an architecture proven: the real class, on files as transformers writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pico_models import NO_CACHE, NO_GENERATE, NO_USE_CACHE, model_class, pico_config, pico_inputs, runnable
from safetensors.torch import load_file, save_file

from mha2gqa import convert_model, heads
from mha2gqa.architectures import AttentionSpec, find_attention_modules, find_spec, geometry, rotary_dim
from mha2gqa.checkpoints.config_spelling import both_spellings
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, quiet
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.conversion.plan import plan_conversion
from mha2gqa.conversion.rewrite import ModuleConverter
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.heads import AttentionWeights
from mha2gqa.reconstruct import ReconstructConfig

Tensors = dict[str, torch.Tensor]


def make_every_weight_matter(model: torch.nn.Module) -> None:
    """Random weights of unit gain; biases, norms and sinks off their defaults."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        wide = parameter.dim() > 1
        parameter.data = noise * parameter.shape[-1] ** -0.5 if wide else parameter.data + 0.2 * noise


def load_complete(model_class: Any, path: Path) -> torch.nn.Module:
    """The stock class on a folder: every tensor must be used and none made up."""
    with quiet():
        model, info = model_class.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


def read_tensors(path: Path) -> Tensors:
    out: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def write_folder(path: Path, config: dict[str, Any], tensors: Tensors) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    contiguous = {name: x.contiguous() for name, x in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})


def split_sites(config: dict[str, Any], tensors: Tensors) -> list[tuple[Any, AttentionWeights]]:
    """Every attention module with its weights, heads first."""
    spec = find_spec(config)
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    return [
        (
            module,
            heads.split(
                spec,
                geometry(spec, config, module, shapes),
                {role: tensors[name] for role, name in module.names.items()},
            ),
        )
        for module in find_attention_modules(spec, tensors)
    ]


def stored(spec: AttentionSpec, module: Any, weights: AttentionWeights) -> Tensors:
    roles = heads.unsplit(spec, weights)
    return {name: roles[role] for role, name in module.names.items() if role in roles}


def expanded(config: dict[str, Any], tensors: Tensors, new_config: dict[str, Any], new: Tensors) -> Tensors:
    """The source's tensors with the converted heads in place, repeated up to the source's number."""
    spec, out = find_spec(config), dict(tensors)
    few = split_sites(new_config, new)
    many = split_sites(config, tensors)
    assert [module.layer for module, _ in few] == [module.layer for module, _ in many]
    for (_, weights), (module, source) in zip(few, many, strict=True):
        out |= stored(spec, module, heads.expand(weights, source.num_kv_heads, spec))
    return out


def merged(config: dict[str, Any], tensors: Tensors, groups: int, method: str = "mean") -> Tensors:
    """A conversion without files."""
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    plan = plan_conversion(config, shapes, groups, method=method)
    out = dict(tensors)
    for module in plan.modules:
        converter = ModuleConverter(plan, module, shapes, tensors.__getitem__)
        out |= {name: converter.tensor(role) for role, name in converter.names.items()}
        for name in converter.removed:
            del out[name]
    return out


def config_difference(before: Any, after: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths at which two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        return set().union(*(config_difference(before.get(k), after.get(k), (*path, k)) for k in keys))
    return set() if before == after else {path}


# --- symmetries ------------------------------------------------------------------------------------------


def _well_conditioned(count: int, size: int) -> torch.Tensor:
    """`count` invertible matrices, singular values between 1/2 and 2."""
    left, _ = torch.linalg.qr(torch.randn(count, size, size))
    right, _ = torch.linalg.qr(torch.randn(count, size, size))
    return left @ torch.diag_embed(2 ** (2 * torch.rand(count, size) - 1)) @ right


def _per_query(x: torch.Tensor, weights: AttentionWeights) -> torch.Tensor:
    return x.repeat_interleave(weights.num_heads // weights.num_kv_heads, 0)


def _turn(x: torch.Tensor | None, matrix: torch.Tensor) -> torch.Tensor | None:
    """`matrix [h, d, d]` on `x [h, d, …]`."""
    return None if x is None else torch.einsum("hij,hj...->hi...", matrix, x)


def key_matrix(spec: AttentionSpec, count: int, head_dim: int, rotary: int) -> torch.Tensor:
    """A random change of every key head that the spec allows."""
    if spec.key_symmetry == "linear":
        return _well_conditioned(count, head_dim)
    first, second, rest = heads.rotary_pair_index(spec.position, rotary, head_dim)
    angle = 6.28 * torch.rand(count, len(first))
    size = 2 ** (2 * torch.rand(count, len(first)) - 1) if spec.key_symmetry == "planes" else 1.0
    cos, sin = size * angle.cos(), size * angle.sin()
    out = torch.eye(head_dim).repeat(count, 1, 1)
    out[:, first, first], out[:, second, second] = cos, cos
    out[:, first, second], out[:, second, first] = -sin, sin
    if spec.key_symmetry == "planes" and rest:
        out[:, torch.tensor(rest)[:, None], rest] = _well_conditioned(count, len(rest))
    return out


def _scaled_through_gains(weights: AttentionWeights) -> AttentionWeights:
    """A key's amplitude moved into its queries through the gains of full-width norms."""
    amplitude = 2 ** (2 * torch.rand(weights.num_kv_heads, 1) - 1)
    undo = _per_query(1 / amplitude, weights)
    return replace(
        weights,
        kv_extras={n: x * amplitude if n.startswith("k_norm") else x for n, x in weights.kv_extras.items()},
        query_extras={n: x * undo if n.startswith("q_norm") else x for n, x in weights.query_extras.items()},
    )


def equal_gains_in_planes(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Norm weights of q and k with one gain per plane, as `plane_rotations` and `phases` presuppose."""
    spec, out = find_spec(config), dict(tensors)
    for module, weights in split_sites(config, tensors):
        rotary = rotary_dim(spec, config, weights.k.shape[1], module.layer)
        first, second, _ = heads.rotary_pair_index(spec.position, rotary, weights.k.shape[1])
        names = [f"{norm}.weight" for norm in spec.qk_norm] if spec.qk_norm else []
        if spec.key_symmetry == "phases":
            names = [extra.name for extra in spec.per_head]
        for name in names:
            if name in module.names:
                gains = out[module.names[name]].clone().view(-1, weights.k.shape[1])
                gains[:, second] = gains[:, first]
                out[module.names[name]] = gains.view_as(out[module.names[name]])
    return out


def untouched(tensors: Tensors, source: Tensors) -> bool:
    """Whether every tensor is the very one of `source`."""
    return all(x is source[name] for name, x in tensors.items())


def transformed(config: dict[str, Any], tensors: Tensors, permute: bool = True) -> Tensors:
    """The same function with other weights: everything the spec says may be done, done at random."""
    torch.manual_seed(2)
    spec, out = find_spec(config), dict(tensors)
    orders: dict[int, list[int]] = {}
    for module, weights in split_sites(config, tensors):
        count, head_dim, value_dim = weights.num_kv_heads, weights.k.shape[1], weights.v.shape[1]
        if spec.key_symmetry != "none":
            rotary = rotary_dim(spec, config, head_dim, module.layer)
            matrix = key_matrix(spec, count, head_dim, rotary)
            inverse = _per_query(torch.linalg.inv(matrix).mT, weights)
            weights = replace(
                weights,
                k=_turn(weights.k, matrix),
                k_bias=_turn(weights.k_bias, matrix),
                q=_turn(weights.q, inverse),
                q_bias=_turn(weights.q_bias, inverse),
            )
        if spec.value_symmetry != "none":
            matrix = _well_conditioned(count, value_dim)
            if spec.value_symmetry == "orthogonal":
                matrix = torch.linalg.qr(matrix)[0]
            inverse = _per_query(torch.linalg.inv(matrix), weights)
            weights = replace(
                weights,
                v=_turn(weights.v, matrix),
                v_bias=_turn(weights.v_bias, matrix),
                o=torch.einsum("hDe,hef->hDf", weights.o, inverse),
            )
        if spec.key_symmetry == "phases":
            weights = _scaled_through_gains(weights)
        if permute and spec.permutable != "never":
            order = torch.randperm(count).tolist()
            if spec.permutable == "model":
                order = orders.setdefault(count, order)
            weights = heads.permute_queries(
                weights, heads.query_order([[h] for h in order], weights.num_heads // count)
            )
            weights = replace(
                weights,
                k=weights.k[order],
                v=weights.v[order],
                k_bias=None if weights.k_bias is None else weights.k_bias[order],
                v_bias=None if weights.v_bias is None else weights.v_bias[order],
                kv_extras=heads.pool_per_head(spec, weights.kv_extras, [[h] for h in order]),
            )
        out |= stored(spec, module, weights)
    return out


# --- proofs ----------------------------------------------------------------------------------------------


@dataclass
class Pico:
    """A pico model saved as transformers saves it, and what conversion made of it."""

    model_type: str
    cls: Any
    model: torch.nn.Module
    folder: Path
    groups: int

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def load(self, name: str, config: dict[str, Any], tensors: Tensors) -> torch.nn.Module:
        """Write a folder and load it with the stock class."""
        write_folder(self.folder / name, config, tensors)
        return load_complete(self.cls, self.folder / name)


def convert_pico(model_type: str, folder: Path, groups: int = 2) -> Pico:
    """Build a pico model with the real class, save it, convert it, and check config and key set."""
    cls = model_class(model_type)
    torch.manual_seed(0)
    model = cls(pico_config(model_type)).float().eval()
    make_every_weight_matter(model)
    pico = Pico(model_type, cls, model, folder, groups)
    with quiet():
        model.save_pretrained(pico.source)
    convert(pico.source, pico.out, groups)
    before, after = read_config(pico.source), read_config(pico.out)
    spec = find_spec(before)
    allowed = {(*spec.config_path, *key.split(".")) for key in kv_keys(spec, groups)}
    changed = config_difference(both_spellings(before), after)
    assert changed <= allowed
    assert changed, "no KV key changed"
    assert read_tensors(pico.source).keys() == read_tensors(pico.out).keys()
    return pico


def convert_reexpressed(cls: Any, source: Path, folder: Path, groups: int, as_: str) -> Pico:
    """A checkpoint as another architecture, with all KV heads (`source`) and with `groups` (`out`).

    Args:
        cls: The class of the result.
        source: A checkpoint of the original class.
        folder: Where the two go.
        groups, as_: As `convert` takes them.
    """
    config = read_config(source)
    heads_before = config.get("num_attention_heads", config.get("n_head"))
    every = convert(source, folder / "source", heads_before, as_=as_)
    few = convert(source, folder / "out", groups, as_=as_)
    assert every.reexpression == few.reexpression != {}
    assert [c.ok for c in (*every.verification, *few.verification) if c.name == "re-expression"] == [True] * 2
    pico = Pico(every.reexpression["target_type"], cls, load_complete(cls, folder / "source"), folder, groups)
    again = convert(pico.source, folder / "again", groups)  # in two steps it is the same
    assert again.reexpression == {}
    one, two = read_tensors(pico.out), read_tensors(folder / "again")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert read_config(pico.out) == read_config(folder / "again")
    return pico


def kv_keys(spec: AttentionSpec, groups: int) -> set[str]:
    """The config keys a conversion may change."""
    target = spec.mqa if groups == 1 else spec.gqa
    also = () if target is None else (*target.config, target.kv_heads_key)
    return {*(v.kv_heads_key for v in spec.variants), *spec.kv_heads_keys, *also}


def prove_load(pico: Pico) -> torch.nn.Module:
    """The converted folder loads with empty loading info, and identical heads pool to themselves."""
    small = load_complete(pico.cls, pico.out)
    config, new_config = read_config(pico.source), read_config(pico.out)
    source, new = read_tensors(pico.source), read_tensors(pico.out)
    wide = expanded(config, source, new_config, new)
    again = merged(config, wide, pico.groups)
    assert again.keys() == new.keys()
    assert [name for name in new if not torch.equal(new[name], again[name])] == []
    return small


@torch.no_grad()
def outputs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits, or hidden states of a text model without a head."""
    inputs = pico_inputs(model, ids)
    use_cache = {} if model.config.model_type in NO_USE_CACHE else {"use_cache": False}
    out = runnable(model)(**inputs, **use_cache)
    if isinstance(out, torch.Tensor):
        return out
    return out.logits if "logits" in out else out.last_hidden_state


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, as a share of the spread of `b`."""
    return float((a - b).abs().max() / b.std())


def prove_forward(pico: Pico) -> None:
    """Expand-back equality, every symmetry of the spec, cached decoding, `joint` on symmetric copies."""
    small = prove_load(pico)
    config, new_config = read_config(pico.source), read_config(pico.out)
    source, new = read_tensors(pico.source), read_tensors(pico.out)
    ids = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    wide = expanded(config, source, new_config, new)
    right = outputs(small, ids)
    assert difference(right, outputs(pico.load("wide", config, wide), ids)) < 1e-4, "expand-back"
    assert difference(right, outputs(pico.model, ids)) > 1e-2, "pooling random heads changed nothing"

    equal = equal_gains_in_planes(config, source)
    base = outputs(pico.model if untouched(equal, source) else pico.load("equal", config, equal), ids)
    turned = outputs(pico.load("turned", config, transformed(config, equal)), ids)
    assert difference(turned, base) < 1e-3, "a symmetry that the spec grants"

    if pico.model_type not in NO_CACHE + NO_GENERATE:
        cached, uncached = (decode(small, ids, use_cache) for use_cache in (True, False))
        assert torch.equal(cached, uncached), "cached decoding"
    prove_identical(pico, ids, right)
    prove_joint(pico, ids, right)


def prove_identical(pico: Pico, ids: torch.Tensor, right: torch.Tensor) -> None:
    """Heads that are identical inside each group merge without loss, whatever the gains of norms are."""
    config, new_config = read_config(pico.source), read_config(pico.out)
    copies = expanded(config, read_tensors(pico.source), new_config, read_tensors(pico.out))
    for method in ("joint", "align"):
        made = outputs(
            pico.load(method + "-identical", new_config, merged(config, copies, pico.groups, method)), ids
        )
        assert difference(made, right) < 1e-4, method


def prove_joint(pico: Pico, ids: torch.Tensor, right: torch.Tensor) -> None:
    """Heads that are symmetric copies of each other merge without loss, from the weights alone."""
    config, new_config = read_config(pico.source), read_config(pico.out)
    new = read_tensors(pico.out)
    few = equal_gains_in_planes(new_config, new)
    if not untouched(few, new):
        right = outputs(pico.load("few", new_config, few), ids)
    source = equal_gains_in_planes(config, read_tensors(pico.source))
    copies = transformed(config, expanded(config, source, new_config, few), permute=False)
    joint = merged(config, copies, pico.groups, "joint")
    assert difference(outputs(pico.load("joint", new_config, joint), ids), right) < 1e-3, "joint"


def decode(model: torch.nn.Module, ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
    """Five greedy tokens."""
    inputs = pico_inputs(model, ids[:1])
    return runnable(model).generate(
        **inputs, max_new_tokens=5, do_sample=False, use_cache=use_cache, pad_token_id=0, eos_token_id=None
    )


def prove_fitted(source: Path, folder: Path, text: Path) -> None:
    """A checkpoint that was calibrated and fitted computes what the fitted model in memory does."""
    steps = ReconstructConfig(steps=6, batch_size=4)
    convert(source, folder / "fitted", 2, calibration=[text], calibration_window=16, device="cpu", fit=steps)
    original = load_model(source, device="cpu")
    blocks = token_blocks(load_tokenizer(source), read_documents([text]), 16)
    live = convert_model(original, 2, calibration=blocks, fit=steps)
    ids = blocks[:4, :-1]
    with torch.no_grad():
        before, fitted, stored = (
            m(input_ids=ids).logits for m in (original, live, load_model(folder / "fitted", device="cpu"))
        )
    assert difference(stored, fitted) < 1e-5
    assert difference(before, fitted) > 1e-3
