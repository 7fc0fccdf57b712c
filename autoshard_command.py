"""Start the command `autoshard`. Ctrl-C ends the command with exit status 130 from its first moment on.

Until every import is done, SIGINT ends the process without a KeyboardInterrupt. Parts of torch and numpy catch a
KeyboardInterrupt in their imports, and go on without the import. This module stands beside `autoshard`, because any
import of `autoshard` imports torch.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command line, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from autoshard.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()
