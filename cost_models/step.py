"""What a training step takes beyond its kernels run one by one: a few physical numbers, fitted to published runs.

Kernels inside a step are slower than alone (clocks under sustained power, caches shared with what runs before and
after), collectives reach less than in a benchmark (they start when the last rank does), and both slow each other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from cost_models import constants
from cost_models.constants import HardwareFile


@dataclass(frozen=True, slots=True)
class StepModel:
    """Factors on what the parts of a step take alone.

    Args:
        matmul_slowdown: time of matrix products in a step over their time alone, at the same clock; likewise
        attention_slowdown: of fused attention;
        memory_slowdown: of memory-bound kernels;
        fabric_slowdown: of collectives within nodes;
        network_slowdown: of collectives between nodes.
        interference: seconds that computation takes longer for each second of communication that runs beside it.
        step_overhead_s: once per step: data, scheduler, logging, synchronisation.
        follows_power: whether the clock of products rises where the step does other work too (`cost_models.power`).
    """

    matmul_slowdown: float = 1.0
    attention_slowdown: float = 1.0
    memory_slowdown: float = 1.0
    fabric_slowdown: float = 1.0
    network_slowdown: float = 1.0
    interference: float = 0.189
    step_overhead_s: float = 0.0
    follows_power: bool = True

    def beside(self, computation_s: float, communication_s: float) -> float:
        """Seconds of computation and communication that run side by side.

        max(communication, computation + interference * min(computation, communication))
        """
        return max(communication_s, computation_s + self.slowed(computation_s, communication_s))

    def slowed(self, computation_s: float, communication_s: float) -> float:
        """Seconds that computation takes longer for the communication beside it."""
        return self.interference * min(computation_s, communication_s)

    def at_speed(self, speed: float) -> StepModel:
        """The same with products and attention `speed` times as fast (see `cost_models.power`)."""
        return replace(
            self,
            matmul_slowdown=self.matmul_slowdown / speed,
            attention_slowdown=self.attention_slowdown / speed,
        )


_UNITS = {"step_overhead_s": "s"}


@lru_cache(maxsize=1)
def fitted() -> StepModel:
    """The model of the data file `runtime/step.toml`."""
    file = constants.load("runtime", "step")
    names = (item.name for item in fields(StepModel) if item.name != "follows_power")
    return replace(StepModel(), **{name: _number(file, name) for name in names})


def alone(interference: float) -> StepModel:
    """The model under which kernels and collectives take what they take alone, as in plans of specs.

    Args:
        interference: seconds that computation takes longer for each second of communication beside it.
    """
    return StepModel(interference=interference, follows_power=False)


def _number(file: HardwareFile, name: str) -> float:
    return file.number(name.removesuffix("_s"), _UNITS.get(name, "1"))
