"""Graph modules whose Python code is written at the first run or read.

`torch.fx.GraphModule` writes and compiles its code at every creation and change. A compile makes some ten modules that
the next pass reads node by node and that never run. Their code took a tenth of a compile's time.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Like `fx.GraphModule(root, graph)`; `recompile()` marks a changed graph as usual."""
    return _LazyGraphModule(root, graph)
