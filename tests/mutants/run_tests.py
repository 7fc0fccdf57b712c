"""Runs tests in a process of its own, forked from one that has imported torch already.

A run ends at the first failure, or behind the test with which its processor time is over: a busy machine decides
nothing. A test that alone takes `HANGS` counts as failed: tests that are not marked slow take at most some ten seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

HANGS = 100
"""Seconds of the processor."""
_WAITS = 1200
"""Seconds by the wall's clock, for tests whose processes wait for each other."""
_SETTINGS = {"HYPOTHESIS_PROFILE": "ci", "OMP_NUM_THREADS": "1"}
_ALIKE = ("torch.distributed.tensor", "torch.export", "torch.testing", "pytest", "sympy", "highspy")
_ALIKE += ("torch._dynamo", "torch._inductor", "networkx")
"""Modules that most tests import."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
_BEGUN = "begun: "


def prepare() -> None:
    """Import what most tests do, once."""
    os.environ.update(_SETTINGS)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does, before triton is imported
    for name in _ALIKE:
        importlib.import_module(name)
    gc.freeze()  # pytest collects garbage again and again: of its own only


def failed_test(tree: Path, tests: Sequence[str], limit_s: float) -> str | None:
    """The test that fails first, or hangs; None where all pass that fit into the limit.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        process = os.fork()
        if process == 0:
            _run(tree, tests, limit_s, file.fileno())
        status = _wait(process)
        file.seek(0)
        output = file.read()
    if found := _FAILED.search(output):
        return found.group(1)
    if os.WIFSIGNALED(status):
        begun = [line.removeprefix(_BEGUN) for line in output.splitlines() if line.startswith(_BEGUN)]
        return begun[-1] if begun else tests[0]
    if os.WEXITSTATUS(status) not in (0, 2, 5):
        raise RuntimeError(f"pytest ended with {os.WEXITSTATUS(status)}.\n{output}")
    return None


def _wait(process: int) -> int:
    end = time.monotonic() + _WAITS
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
        time.sleep(0.2)


def _run(tree: Path, tests: Sequence[str], limit_s: float, output: int) -> None:
    """In the forked process, which ends here."""
    import pytest

    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(tree.parent / "compiled")
        _forget(tree)
        _import_sources(tests)
        resource.setrlimit(resource.RLIMIT_CPU, (HANGS, -1))
        words = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        code = int(pytest.main(words, plugins=[_Watch(limit_s, output)]))
        sys.stdout.flush()
        os._exit(code)
    finally:
        traceback.print_exc()
        os._exit(99)


def _forget(tree: Path) -> None:
    """Take the tree's packages for those of this process."""
    own = Path(__file__).parents[2]
    for name in list(sys.modules):
        if name.partition(".")[0] == __name__.partition(".")[0]:
            del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != own)]
    importlib.invalidate_caches()


def _import_sources(tests: Sequence[str]) -> None:
    """Import the files whose examples are tests under their own names: pytest would execute them a second time.

    One that the change keeps from being imported is left to pytest, which says so.
    """
    for name in tests:
        if name.endswith(".py") and not name.startswith("tests/"):
            with suppress(Exception):
                importlib.import_module(name.removesuffix(".py").replace("/", "."))


class _Watch:
    """Tells which test has begun, and ends the run once its time is over."""

    def __init__(self, limit_s: float, output: int) -> None:
        self._limit_s = limit_s
        self._output = output
        self._session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._output, f"\n{_BEGUN}{nodeid}\n".encode())
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + HANGS, -1))

    def pytest_runtest_logfinish(self) -> None:
        if time.process_time() > self._limit_s:
            self._session.shouldstop = "The time is over."
