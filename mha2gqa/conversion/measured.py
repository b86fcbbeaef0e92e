"""Second moments of a walk: those of the blocks at hand, and what the result says of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..calibration import SecondMoments, Statistics, data_digest, fingerprint, module_key, moment_warnings
from .inputs import Inputs
from .plan import ModulePlan
from .work_dir import FinishedBlock

ROWS = "rows."  # rows of projections among the moments of a finished block


class Measured:
    """Second moments by module key, and of each projection the rows that a fingerprint reads.

    Args:
        read: Name -> tensor of the original, of the block that is loaded.
        keep: Whether moments outlive their module's merging, to be saved.
    """

    def __init__(self, read: Callable[[str], Tensor], keep: bool) -> None:
        self.read, self.keep = read, keep
        self.moments: dict[str, SecondMoments] = {}
        self.seen: dict[str, tuple[bool, int, int]] = {}  # module key -> observed, tokens, dims
        self.rows: dict[str, Tensor] = {}

    def add(self, module: ModulePlan, moments: SecondMoments) -> None:
        """Keep a module's moments until it is merged, and what the result says of them."""
        key = module_key(module.module)
        self.moments[key] = moments
        self.seen[key] = (moments.mixed is not None, moments.tokens, len(moments.inputs) - 1)
        for role, name in module.names.items():
            if role.endswith(".weight"):
                self.rows[name] = self.read(name)[:2].detach().cpu()

    def merged(self, module: ModulePlan) -> None:
        """Let go of the moments of a module; those that are to be saved leave the device, which holds one layer's."""
        key = module_key(module.module)
        if not self.keep:
            self.moments.pop(key, None)
        elif key in self.moments:
            self.moments[key] = self.moments[key].cpu()

    def statistics(self) -> Statistics | None:
        """What is known now; None where nothing was measured."""
        return Statistics(self.moments) if self.moments else None

    def of_block(self, modules: Iterable[ModulePlan]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and figures of these modules, as the work folder keeps them."""
        modules = list(modules)
        keys = [module_key(m.module) for m in modules]
        tensors: dict[str, Tensor] = {}
        for key in keys if self.keep else ():
            tensors |= self.moments[key].tensors(key) if key in self.moments else {}
        names = [name for m in modules for name in m.names.values() if name in self.rows]
        tensors |= {f"{ROWS}{name}": self.rows[name] for name in names}
        return tensors, {key: self.seen[key] for key in keys if key in self.seen}

    def restore(self, done: FinishedBlock) -> None:
        """Take over what an earlier run measured of a block."""
        self.seen |= {key: tuple(x) for key, x in done.info["seen"].items()}
        rows = {name: x for name, x in done.moments.items() if name.startswith(ROWS)}
        self.rows |= {name.removeprefix(ROWS): x for name, x in rows.items()}
        self.moments |= SecondMoments.from_tensors({n: x for n, x in done.moments.items() if n not in rows})

    def about(self, model: Any, inputs: Inputs, modules: Iterable[ModulePlan]) -> dict[str, Any]:
        """Tokens, text, model and warnings, for the result and the statistics file."""
        return {
            "tokens": inputs.tokens,
            "window": inputs.window,
            "data_sha256": data_digest(inputs.read),
            "model": fingerprint([m.module for m in modules], self.rows.__getitem__),
            "notes": moment_warnings(list(self.seen.values()), model),
        }
