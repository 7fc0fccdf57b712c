"""Tracing: a model and example inputs become a joint forward-and-backward `Program`.

The one folder that uses private interfaces of torch.
"""

from autoshard.tracing.guards import check_guards
from autoshard.tracing.trace import trace

__all__ = ["check_guards", "trace"]
