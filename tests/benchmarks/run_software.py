"""Offers of the software of each source when its runs were published: the part of the space that its users had.

Each entry is a union of restrictions of the searched fields (`recipe_space.Only`). If a source is silent, an
option is taken to have been there, so that what a plan gains within these restrictions is not laid to the software.

* Activations on the host: by Composer's FSDP (`activation_cpu_offload`), and by Megatron Core where there is no
  pipeline (cpu_offloading_num_layers; three rows of Megatron-Bridge have it, for some of their layers).
* llm-foundry (2023): FSDP alone, no other axis; blocks are computed again whole or not at all.
* Megatron-DeepSpeed (BigScience, 2021 to 2022): 1F1B; its pipelines refuse ZeRO-2 and -3
  (deepspeed/runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism").
* Megatron-LM: no pipelines in 2020; interleaved ones in 2021 (Narayanan et al. 2021); sequence parallelism and
  selective recomputation in 2022 (Korthikanti et al. 2022); context parallelism with Megatron Core 0.4 (CHANGELOG.md),
  after the launcher's runs of 2023; no schedule that cuts backwards in two (issue 1399, open); ZeRO-2 and -3 as FSDP.
* InternEvo (v0.2.1dev20231121): FSDP without pipelines, else ZeRO-1; its zero-bubble pipelines came later.
* sc21-table2 compares Megatron-LM with DeepSpeed's ZeRO-3 without other axes: the union of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.ir.execution import Execution
from passes.search.recipe_space import SEARCHED, Only

_WHOLE_BLOCKS: Only = {"recompute": ("none", "full")}
_ON_DEVICE: Only = {"offload": ("none",)}
_OF_2021: Only = {**_WHOLE_BLOCKS, **_ON_DEVICE, "context": (1,), "sequence_parallel": (False,)}
_1F1B: Only = {"schedule": (None, "1F1B")}
_INTERLEAVED: Only = {"schedule": (None, "1F1B", "Interleaved1F1B")}
_ALONE: Only = dict.fromkeys(("tensor", "context", "expert", "pipeline"), (1,))
_MEGATRON_CORE: tuple[Only, ...] = ({**_INTERLEAVED, **_ON_DEVICE, "zero": (0, 1)}, {"pipeline": (1,)})

OFFERED: Mapping[str, tuple[Only, ...]] = {
    "mosaicml": ({**_ALONE, **_WHOLE_BLOCKS, "zero": (0, 2, 3)},),
    "bigscience": ({**_OF_2021, **_1F1B, "zero": (0, 1)}, {**_OF_2021, "pipeline": (1,), "zero": (2, 3)}),
    "megatron-2020": ({**_OF_2021, "pipeline": (1,), "zero": (0,)},),
    "sc21-table1": ({**_OF_2021, **_INTERLEAVED, "zero": (0,)},),
    "sc21-table2": ({**_OF_2021, **_INTERLEAVED, "zero": (0,)}, {**_OF_2021, **_ALONE, "zero": (1, 2, 3)}),
    "korthikanti": ({**_INTERLEAVED, **_ON_DEVICE, "context": (1,), "zero": (0, 1)},),
    "internevo": (
        {**_WHOLE_BLOCKS, **_INTERLEAVED, **_ON_DEVICE, "context": (1,), "zero": (0, 1)},
        {**_WHOLE_BLOCKS, **_ON_DEVICE, "pipeline": (1,), "context": (1,), "zero": (3,)},
    ),
    "nemo-launcher-a100": ({**_INTERLEAVED, **_ON_DEVICE, "context": (1,), "zero": (0, 1)},),
    "nemo-24.07": _MEGATRON_CORE,
    "mlm-llama-readme": _MEGATRON_CORE,
    "megatron-bridge": _MEGATRON_CORE,
}
"""By source."""


def is_offered(recipe: Execution, source: str) -> bool:
    """Whether a source's software could run a recipe."""
    return any(not _refused(recipe, only) for only in OFFERED[source])


def lacking(recipe: Execution, source: str) -> tuple[str, ...]:
    """In words, what a recipe does that a source's software did not offer, by the restrictions that refuse least."""
    refused = (_refused(recipe, only) for only in OFFERED[source])
    return min(refused, key=lambda words: ("pipeline" in words, len(words)))


def _refused(recipe: Execution, only: Only) -> tuple[str, ...]:
    named = replace(recipe, schedule=None) if recipe.pipeline == 1 else recipe
    return tuple(_words(named, name) for name in SEARCHED if name in only and getattr(named, name) not in only[name])


def _words(recipe: Execution, name: str) -> str:
    value = getattr(recipe, name)
    match name:
        case "zero":
            return f"ZeRO-{value}" + (" with a pipeline" if recipe.pipeline > 1 else "")
        case "recompute":
            return f"{value} recomputation"
        case "offload":
            return "activations on the host"
        case "schedule":
            return f"schedule {value}"
        case _:
            return name.replace("_", " ")
