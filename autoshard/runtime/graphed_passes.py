"""`GraphedPasses` runs the forward and backward of a micro-batch as one CUDA graph."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoshard.ir.program import InputKind
from autoshard.runtime.cuda_graph import CudaGraph, Record, record_on_cuda
from autoshard.runtime.executable import Executable
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.versions import Key


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The CUDA graphs of one program.

    Args:
        hoisted: computes values that depend on parameters alone, once per step.
        passes: runs the forward and the backward of a micro-batch.
    """

    hoisted: CudaGraph
    passes: CudaGraph


@dataclass(frozen=True, slots=True)
class GraphedPasses:
    """Runs forwards and backwards of programs as CUDA graphs, and keeps the graphs of each program.

    `record` records a function's kernels as a graph.
    """

    record: Record = record_on_cuda
    _graphs: PerProgram[_Graphs] = field(default_factory=PerProgram)

    def run_hoisted(self, executable: Executable, values: Sequence[Tensor]) -> list[Tensor]:
        """Compute the values that depend on parameters alone (`Executable.run_hoisted_on`) as a CUDA graph.

        `values` is the result of `Executable.for_hoisted`.
        """
        if executable.phased.hoisted is None:
            return []
        return self._of(executable).hoisted.run(executable.run_hoisted_on, values)

    def run(
        self, executable: Executable, values: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run forward and backward of a micro-batch; return the local outputs, and the local gradients for the update.

        `values` are local inputs, then the results of `run_hoisted`. `tangents` are local gradients of outputs. The
        results are valid until the next call.
        """

        def run_both(given: list[Tensor]) -> list[Tensor]:
            of_outputs = [given.pop(0) for _ in tangents]
            results, saved = executable.run_forward_on(given)
            saved += of_outputs
            return [*results, *executable.run_backward_on(saved)[1]]

        found = self._of(executable).passes.run(run_both, [*tangents, *values])
        count = len(executable.outputs)
        return found[:count], found[count:]

    def _of(self, executable: Executable) -> _Graphs:
        return self._graphs.get_or_make(executable, lambda: self._new(executable))

    def _new(self, executable: Executable) -> _Graphs:
        count = len(executable.tangents)
        names = enumerate(executable.input_names, count)
        moving = {place for place, key in names if not _stays(key, executable.updated_buffers)}
        return _Graphs(CudaGraph(set(), self.record), CudaGraph({*range(count), *moving}, self.record))


def _stays(key: Key, updated_buffers: Container[str]) -> bool:
    """Whether an input has the same address in each call: a parameter, or a buffer that calls do not change."""
    kind, name = key
    return kind is InputKind.PARAMETER or (kind is InputKind.BUFFER and name not in updated_buffers)
