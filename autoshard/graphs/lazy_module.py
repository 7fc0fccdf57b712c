"""Graph modules whose Python code is written when they are first run or read.

`torch.fx.GraphModule` writes and compiles the code of its graph whenever one is made or changed. A compile makes some
ten, each read node by node by the next pass and never run: that was a tenth of its time.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """As `fx.GraphModule(root, graph)`; `recompile()` says that the graph was changed, as ever."""
    return _LazyGraphModule(root, graph)
