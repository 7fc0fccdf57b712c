"""Find the sites at the same place of repeated blocks, so that the search chooses one strategy for all of them.

A block is a module whose path ends in a number (`layers.3`) and which has at least two matrix products. Take a module
of a block, such as `layers.3.mlp`, and the same module of another block. If both issue the same sequence of calls in a
phase, then their n-th calls are folded: they get the same strategy.

Folding changes no price. A bad fold may miss a better plan, but never gives a wrong plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from autoshard.ir.program import InputKind, InputSlot, Program
from autoshard.ir.update import parameter_of
from passes.strategies.enumerate_strategies import SearchSpace, Site

_MATRIX_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "attention")


def fold_blocks(space: SearchSpace) -> dict[str, str]:
    """Return the name of each site's representative, by the site's name. A site gets its representative's strategy.

    Folded sites, at the same place of repeated blocks, have one representative: the first of them. All other sites
    represent themselves.
    """
    blocks = numbered_blocks(space.sites.values())
    modules: dict[tuple[str, str], list[Site]] = defaultdict(list)
    paths = module_paths(space.program)
    for name, site in space.sites.items():
        modules[paths.get(name, ""), site.phase].append(site)
    representative: dict[tuple[object, ...], str] = {}
    result: dict[str, str] = {}
    for (module, phase), sites in modules.items():
        folded = _fold_path(module, blocks)
        signature = tuple(_signature(site) for site in sites)
        for position, site in enumerate(sites):
            if folded == module:
                result[site.name] = site.name
            else:
                key = (folded, phase, signature, position)
                result[site.name] = representative.setdefault(key, site.name)
    return result


def numbered_blocks(sites: Iterable[Site]) -> frozenset[str]:
    """Return the paths ("layers.3") of modules that end in a number and run at least two matrix products forward."""
    products: dict[str, int] = defaultdict(int)
    for site in sites:
        if site.node is not None and site.phase == "forward" and _is_matrix_product(site.node.target):
            parts = site.node.meta.get("module", "").split(".")
            for end in range(1, len(parts) + 1):
                if parts[end - 1].isdigit():
                    products[".".join(parts[:end])] += 1
    return frozenset(path for path, count in products.items() if count >= 2)


def _is_matrix_product(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._opname in _MATRIX_PRODUCTS


def module_paths(program: Program) -> dict[str, str]:
    """Return the module path of each node, by the node's name.

    The path of an input is its own name ("layers.3.weight").
    """
    slots = {slot.node: _name(slot) for slot in program.inputs}
    return {node.name: slots.get(node.name) or node.meta.get("module", "") for node in program.graph.nodes}


def _name(slot: InputSlot) -> str:
    """Return the name of an input as a path.

    The state "exp_avg:wte.weight" of an optimizer has the path "wte.weight.exp_avg".
    """
    if slot.kind != InputKind.STATE:
        return slot.name
    return f"{parameter_of(slot.name)}.{slot.name.partition(':')[0]}"


def _fold_path(module: str, blocks: frozenset[str]) -> str:
    parts = module.split(".")
    return ".".join(
        "*" if part.isdigit() and ".".join(parts[: end + 1]) in blocks else part for end, part in enumerate(parts)
    )


def _signature(site: Site) -> tuple[object, ...]:
    """Return a key of a site: its operator, shapes, dtypes and strategies.

    Sites share a strategy only if their keys are equal.
    """
    return (site.call, site.results, id(site.strategies))
