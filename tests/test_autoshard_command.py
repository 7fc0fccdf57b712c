"""SIGINT ends the command in a separate process, during its imports and afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "autoshard":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed, as numpy does within its import")
                sys.exit(0)

sys.meta_path.insert(0, Interrupt())
"""

_STUB = """
import signal, sys, types
sys.modules["autoshard"] = types.ModuleType("autoshard")
sys.modules["autoshard.cli"] = stub = types.ModuleType("autoshard.cli")
stub.main = lambda: print(signal.getsignal(signal.SIGINT))
"""

_START = """
from autoshard_command import main
main()
"""


_HEARS_CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Code that makes SIGINT raise KeyboardInterrupt, as in a terminal: a script's background processes ignore SIGINT."""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _HEARS_CTRL_C + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ctrl_c_during_imports_ends_the_command() -> None:
    """Ctrl-C during imports ends the command by the signal without output, although an import would swallow the
    exception."""
    done = _run(_INTERRUPTED_IMPORT + _START)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_pythons_own_once_everything_is_imported() -> None:
    """After the imports, the handler of SIGINT is Python's own."""
    assert "default_int_handler" in _run(_STUB + _START).stdout


def test_a_command_that_is_to_ignore_ctrl_c_does() -> None:
    """A command that a shell starts in the background, with SIGINT ignored, keeps ignoring it."""
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    assert _run(ignored + _STUB + _START).stdout.strip() == str(signal.SIG_IGN)
