"""Graph modules that generate their Python code only when somebody runs the module or reads its code.

`torch.fx.GraphModule` generates code at every creation and change. Most modules of a compile never run, because the
next pass only reads their nodes. Their code took a tenth of a compile's time.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a module like `fx.GraphModule(root, graph)`; code is generated at first use, and after `recompile()`."""
    return _LazyGraphModule(root, graph)
