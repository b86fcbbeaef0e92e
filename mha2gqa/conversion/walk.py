"""The layer walk: measure, group, merge and fit one decoder block after the other, on the streams of both models.

Only one block of the original and of the converted model has its weights on the device, and while it is fitted the
original's next one, whose groupings are searched meanwhile. Where the original is in memory as a whole, the walk is the
same and its blocks simply stay.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import distributed, progress
from ..calibration import (
    Statistics,
    collect,
    counted_clips,
    find_clip,
    module_key,
)
from ..checkpoints.streaming import Layers, place
from ..errors import CheckpointError
from ..evaluation.context import context_warnings
from ..reconstruct import ReconstructConfig
from ..reconstruct.driver import Fitter, find_pairs, split_batches
from ..reconstruct.hidden_states import Stream
from ..reconstruct.module_calls import block_paths
from ..reconstruct.ranks import Ranks
from ..reconstruct.train_state import frozen, repeatable, rest_of_block
from .block_weights import BlockWeights, tensor_of
from .calibration_options import CALIBRATED, CalibrationOptions
from .clock import Clock
from .converted import Converted, NotAChain
from .in_memory import empty_copy
from .inputs import Inputs, held_out_loss
from .measured import Measured
from .plan import ModulePlan, Plan
from .rewrite import ModuleConverter
from .search import SearchBeside, grouped
from .storing import result_spec
from .validation import Validation
from .walk_report import WalkReport
from .walk_rows import batch_rows, block_sums, hidden_state_memory, own_rows
from .work_dir import FinishedBlock, WorkDir

logger = logging.getLogger("mha2gqa")
AHEAD_BYTES = 4 << 30  # a block of more weights than this is not looked at before its turn


class Walk:
    """One walk over the blocks of a model.

    Args:
        layers: The original model, whose blocks are loaded one at a time.
        plan: The conversion in the names of the original's state dict, its groupings as they are before a search.
        inputs: What the model reads: rows to learn from.
        validation: Rows to judge the result by; None where there are too few.
        options: Grouping, statistics.
        config: The stages after merging; None for none.
        work: Keeps what is done of each block, and has what an earlier run has done; None leaves the blocks in
            the converted model.
        statistics: Second moments that are known already.
        stored: Digest of the checkpoint's attention weights, if it is not that of the model in memory.
    """

    def __init__(
        self,
        layers: Layers,
        plan: Plan,
        inputs: Inputs,
        validation: Inputs | None,
        options: CalibrationOptions,
        config: ReconstructConfig | None,
        work: WorkDir | None = None,
        statistics: Statistics | None = None,
        stored: str | None = None,
    ) -> None:
        self.layers, self.teacher, self.plan, self.options = layers, layers.model, plan, options
        self.inputs, self.validation, self.work, self.config = inputs, validation, work, config
        self.statistics, self.given, self.stored = statistics, statistics is not None, stored
        self.ranks, self.clock = Ranks.here(), Clock(layers.device)
        self.clip = find_clip(self.teacher, plan.spec, [m.module for m in plan.modules])
        ordered = sorted(plan.modules, key=lambda m: (m.module.layer, m.module.kind != "self"))
        self.blocks = block_paths(self.teacher, ordered[0].module)
        self.of_block = {b: [m.path for m in ordered if m.path.startswith(f"{b}.")] for b in self.blocks}
        self.shapes = {name: tuple(x.shape) for name, x in self.teacher.state_dict().items()}
        self.report = WalkReport()
        self.kept: Validation | None = None
        self.done = 0  # blocks that an earlier run has finished
        self.grouped_already = False
        self.begun: dict[str, SearchBeside] = {}  # searches for blocks to come, by block
        self.student = empty_copy(self.teacher, plan)
        if not layers.resident:
            place(self.student, layers.device)
        self.weights = BlockWeights(layers, self.student, self.blocks, self.ranks)
        self.measured = Measured(self.weights.read, keep=options.statistics is not None)
        self.own_spec = result_spec(plan.spec, plan)
        pairs = find_pairs(self.teacher, self.student, plan.spec, self.own_spec)
        shared = {module_key(m.module) for m in plan.modules if not m.unchanged}
        self.pairs = [pair for pair in pairs if module_key(pair.module) in shared]
        self.own_clip = find_clip(self.student, self.own_spec, [pair.module for pair in self.pairs])

    # --- the whole ---------------------------------------------------------------------------------------

    def run(self) -> Converted:
        """Walk, and return the converted model with its reports.

        Raises:
            NotAChain: The blocks need all of the model, which is not in memory.
            CheckpointError, DataError: Activations are not finite, or memory does not suffice; the module is named.
        """
        shown = progress.current()
        with frozen(self.teacher, self.student), repeatable(), torch.no_grad():
            self._begin()
            if self.work is not None:
                self.done = self.ranks.agree(self.work.count())
            shown.stage(
                "fitting" if self.config else "merging",
                len(self.blocks),
                "layers",
                min(self.done, len(self.blocks)),
            )
            try:
                for number, block in enumerate(self.blocks):
                    self._visit(number, block)
                    shown.advance(max(number + 1, self.done), self.report.note())
            except torch.OutOfMemoryError as error:
                raise self._too_large(block) from error
            finally:  # what is still begun where the walk ends early
                for search in self.begun.values():
                    search.stop()
            if self.work is not None:
                self.work.wait()
            with self.clock("losses"):
                losses = self._losses()
        return self._result(losses)

    def _begin(self) -> None:
        """Bring both models to the input of their first block.

        Raises:
            NotAChain: The blocks need all of the model, which is not in memory.
        """
        size = batch_rows(self.config, self.inputs, self.ranks)
        root = self.work.root if self.work is not None else None
        self.memory, slow = hidden_state_memory(
            self.teacher, self.inputs, self.layers.device, self.ranks, root
        )
        for warning in slow:
            self.report.warnings.append(warning)
            logger.info(warning)
        self.layers.load(self.blocks[0])
        self.original = Stream(
            self.teacher, own_rows(self.inputs, self.ranks), size, self.blocks, self.memory
        )
        if not self.original.chained and not self.layers.resident:
            raise NotAChain
        self.weights.share_outside()
        if self._all_at_once():
            self._measure_all()
        if self.validation is not None and self.original.chained:
            self.kept = Validation(
                rows=self.validation,
                teacher=self.teacher,
                student=self.student,
                blocks=self.blocks,
                vocabulary=self._vocabulary(),
                device=self.layers.device,
                fitted=self.config is not None,
                masked=self.original.masked,
            )
        self.fitter = None if self.config is None else self._fitter(self.config)
        if not self.original.chained:
            self._merge_all()

    def _stream(self, model: Any) -> Stream:
        """A stream of the calibration rows from the first block on, chained and masked as `original` was found to be."""
        known = self.original
        return Stream(
            model,
            own_rows(self.inputs, self.ranks),
            known.size,
            self.blocks,
            self.memory,
            chained=known.chained,
            masked=known.masked,
        )

    def _fitter(self, config: ReconstructConfig) -> Fitter:
        """What fits the merged modules, on a stream of the converted model beside the original's."""
        return Fitter(
            self._stream(self.student),
            self.original,
            (self.plan.spec, self.own_spec),
            split_batches(self.inputs.read, config),
            config,
            self.ranks,
        )

    def _visit(self, number: int, block: str) -> None:
        """Do one block, or take what an earlier run has made of it, and move on."""
        with self.clock("loading"):
            self.layers.load(block)
            if number + 1 < len(self.blocks):
                self.layers.prefetch(self.blocks[number + 1])
        if self.work is not None and number < self.done:
            self._restore(block, self.work.get(number), last=number + 1 == self.done)
        else:
            changed = self._make(block)
            with self.clock("saving"):
                if self.work is not None and distributed.is_rank_zero():
                    self.work.put(number, self._finished(block, changed))
                distributed.barrier()
        if number + 1 < len(self.blocks):
            if self.fitter is not None:
                self.fitter.leave()
            else:
                self.original.advance()
        self.weights.free(block)

    def _make(self, block: str) -> list[str]:
        """Measure, group, merge and fit the modules of a block; returns the names of the tensors that changed."""
        if self.original.chained:
            if not self.grouped_already:
                self._measure(block)
                self._group(self._modules(block), self.begun.pop(block, None))
            changed = self._merge(block)
            if self.kept is not None:
                with self.clock("validation"):
                    self.kept.advance("original")
                    self._advance("merged", self.fitter is None)
        else:
            changed = []
        if self.fitter is not None:
            self._fit(block)
            if self.kept is not None:
                with self.clock("validation"):
                    self._advance("fitted", True)
        return changed

    def _advance(self, name: str, final: bool) -> None:
        """Move the validation rows past the block; with its final weights count where a bound on q, k and v acts."""
        assert self.kept is not None
        with counted_clips(self.student, self.own_clip if final else None) as counts:
            self.kept.advance(name)
        for pair in self.pairs:
            if (count := counts.get(pair.module.path)) is not None:
                self.report.clipped(pair.teacher.path, count)

    # --- what is measured --------------------------------------------------------------------------------

    def _measure(self, block: str) -> None:
        """Second moments of the modules of a block, on the original's stream."""
        paths = self.of_block[block]
        if self.given or self.plan.method not in CALIBRATED or not paths or block in self.begun:
            return
        with self.clock("statistics"):
            modules = self._modules(block)
            sums = block_sums(self.original, modules, self.clip, self.inputs.window)
            for module in modules:
                sums[module.path].pool(self.ranks.sum)
                self.measured.add(module, sums[module.path].finish())

    def _measure_all(self) -> None:
        """Moments and groupings of all modules before any is merged."""
        if not self.original.chained:
            with self.clock("statistics"):
                found = collect(self.teacher, self.plan.spec, self.inputs.read)
            for module in self.plan.modules if not self.given and self.plan.method in CALIBRATED else ():
                self.measured.add(module, found.of(module.module))
        else:
            progress.current().stage("statistics", len(self.blocks), "layers")
            for number, block in enumerate(self.blocks):
                self.layers.load(block)
                self._measure(block)
                self.original.advance()
                self.layers.free(block)
                progress.current().advance(number + 1)
            self.layers.load(self.blocks[0])
            self.original = self._stream(self.teacher)
        self._group(self.plan.modules)
        self.grouped_already = True

    def _all_at_once(self) -> bool:
        """Whether one order of heads holds for all layers (a position bias that they share), or blocks do not form a chain."""
        searched = self.options.how(self.plan) == "search"
        together = any(
            self.plan.spec.permutable_of(m.module.kind) == "model"
            and len(m.grouping) not in (1, m.geometry.num_kv_heads)
            for m in self.plan.modules
        )
        return not self.original.chained or (searched and together)

    # --- what is merged ----------------------------------------------------------------------------------

    def _group(
        self, modules: tuple[ModulePlan, ...] | list[ModulePlan], begun: SearchBeside | None = None
    ) -> None:
        """Search which heads of these modules share: the ranks together, or as it has been begun."""
        with self.clock("grouping"):
            read = partial(self.weights.read_anywhere, at=self.original.at)
            if begun is None:
                self.plan, fields = grouped(
                    self.plan, read, self._moments(), self.options, modules, self.ranks
                )
            else:
                self.plan, fields = begun(self.plan)
            self.report.begin(fields)

    def _look_ahead(self) -> None:
        """Measure the next block and begin its search, which takes cores and no GPU: the fits of this one follow."""
        assert self.fitter is not None
        number, outputs = self.original.at + 1, self.fitter.outputs
        if outputs is None or not self._searches_ahead(number):
            return
        block = self.blocks[number]
        with self.clock("loading"):
            self.layers.load(block)
        with self.original.ahead(outputs):
            self._measure(block)
        with self.clock("grouping"):
            read = partial(self.weights.read_anywhere, at=number)
            self.begun[block] = SearchBeside(
                self.plan, read, self._moments(), self.options, self._modules(block), self.ranks
            )

    def _searches_ahead(self, number: int) -> bool:
        """Whether the groupings of this block are searched, on their own, and its weights may lie beside another's."""
        if number == len(self.blocks) or self.grouped_already or self.options.how(self.plan) != "search":
            return False
        weights = self.teacher.get_submodule(self.blocks[number]).parameters()
        return self.layers.resident or sum(p.numel() * p.element_size() for p in weights) <= AHEAD_BYTES

    def _merge(self, block: str) -> list[str]:
        """Merge the modules of a block into the converted model's."""
        with self.clock("merge"):
            new: dict[str, Tensor] = {}
            for module in self._modules(block):
                moments = self._moments()
                converter = ModuleConverter(self.plan, module, self.shapes, self.weights.read, moments)
                new |= {name: converter.tensor(role) for role, name in converter.names.items()}
                self.report.merged(module.path, converter.report)
                self.measured.merged(module)
            self.weights.fill(block, new, self._own(block))
            return sorted(self._own(block))

    def _merge_all(self) -> None:
        """All blocks of a model that is not a chain, before any is fitted."""
        for block in self.blocks:
            self._merge(block)
        if self.validation is not None:
            self._whole_losses = {
                "original": held_out_loss(self.teacher, self.validation),
                "merged": held_out_loss(self.student, self.validation),
            }

    # --- what is fitted ----------------------------------------------------------------------------------

    def _fit(self, block: str) -> None:
        assert self.fitter is not None
        with self.clock("fit"):
            self.fitter.enter()
        self._look_ahead()
        with self.clock("fit"):
            for fit in self.fitter.visit(self._pairs(block)):
                self.report.fitted(fit)

    # --- what is kept ------------------------------------------------------------------------------------

    def _finished(self, block: str, changed: list[str]) -> FinishedBlock:
        """A block as the work folder keeps it."""
        tensors = {name: tensor_of(self.student, name) for name in changed}
        modules = {
            m.path: {"grouping": [list(g) for g in m.grouping], "report": self.report.modules.get(m.path, {})}
            for m in self._modules(block)
        }
        moments, seen = self.measured.of_block(self._modules(block))
        merged = None if self.kept is None else self.kept.merged
        return FinishedBlock(tensors, modules, merged, moments, {"seen": seen, "seconds": self.clock.seconds})

    def _restore(self, block: str, done: FinishedBlock, last: bool) -> None:
        """Take a block that an earlier run finished, and move the streams of the validation rows past it.

        Args:
            block: Its path.
            done: What is kept of it.
            last: Whether it is the last one that is finished.
        """
        device = self.layers.device
        self.plan = self.plan.regrouped(
            {m.path: m.grouping for m in self.plan.modules}
            | {path: tuple(map(tuple, known["grouping"])) for path, known in done.modules.items()}
        )
        self.report.begin({path: known["report"] for path, known in done.modules.items() if known["report"]})
        self.measured.restore(done)
        self.clock.seconds = dict(done.info["seconds"])
        new = {name: x.to(device) for name, x in done.tensors.items()}
        self.weights.fill(block, new, self._own(block))
        if self.fitter is not None:
            self.fitter.enter()
        if self.kept is not None:
            self.kept.restore(done.merged, last)
            if self.kept.merged is None:
                self.report.warnings.append(
                    "hidden states of the merged model after the last finished layer are lost: its loss is left out"
                )

    # --- helpers -----------------------------------------------------------------------------------------

    def _modules(self, block: str) -> list[ModulePlan]:
        known = {m.path: m for m in self.plan.modules}
        return [known[path] for path in self.of_block[block]]

    def _pairs(self, block: str) -> list[Any]:
        return [pair for pair in self.pairs if pair.teacher.path in self.of_block[block]]

    def _own(self, block: str) -> set[str]:
        """Names of the converted model's own tensors in a block."""
        modules = [pair.module for pair in self._pairs(block)]
        names = {name for module in modules for name in module.names.values()}
        if self.config is not None and self.config.trains_layer and modules:
            names |= set(rest_of_block(self.student, block, self.own_spec, modules))
        return names

    def _vocabulary(self) -> int:
        return int(self.teacher.config.get_text_config().vocab_size)

    def _moments(self) -> Statistics | None:
        if self.given:
            return self.statistics
        return self.measured.statistics()

    def _too_large(self, block: str) -> CheckpointError:
        """What to try where a block does not fit the device."""
        rows = self.config.batch_size if self.config else self.original.size
        kept = " (the layers before it are kept)" if self.work is not None else ""
        return CheckpointError(
            f"out of memory on {self.layers.device} with {rows} blocks of {self.inputs.window} tokens a step{kept}",
            where=block,
            fix=f"repeat with --fit batch_size={max(1, rows // 2)}, or a smaller --calibration-window",
        )

    def _losses(self) -> dict[str, float]:
        """Loss of each model on the validation rows."""
        if self.validation is None:
            return {}
        if not self.original.chained:
            fitted = {"fitted": held_out_loss(self.student, self.validation)} if self.config else {}
            return self._whole_losses | fitted
        return {} if self.kept is None else self.kept.losses()

    def _result(self, losses: dict[str, float]) -> Converted:
        """The converted model; statistics that are to be kept are saved."""
        report, about = self.report, self._about_statistics()
        report.warnings += about.get("statistics", {}).get("notes", [])
        if self.kept is not None:
            report.warnings += context_warnings("the original", self.kept.positions.curve())
        about |= report.about(self.inputs, self.config, losses, self.clock, self.ranks)
        return Converted(self.student.eval(), self.plan, report.modules, about, report.warnings)

    def _about_statistics(self) -> dict[str, Any]:
        """What the result says of the second moments, where there are any; those that are to be kept are saved."""
        if self.given and self.statistics is not None:
            return {"statistics": dict(self.statistics.about)}
        if not self.measured.seen:
            return {}
        about = self.measured.about(self.teacher, self.inputs, self.plan.modules)
        about |= {"stored": self.stored} if self.stored else {}
        about |= {"weights": self.options.weights} if self.options.weights else {}
        if self.options.statistics and distributed.is_rank_zero():
            Statistics(self.measured.moments, about).save(self.options.statistics)
        return {"statistics": about}
