"""What the command `autoshard` starts: Ctrl-C ends it with exit status 130 from its first moment on.

Until everything is imported, SIGINT ends the process as the system does where nobody handles it. A KeyboardInterrupt
would not: parts of torch and numpy catch one within their imports, and go on without what they were importing. It is a
module beside `autoshard`, as importing any part of that imports torch.
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
