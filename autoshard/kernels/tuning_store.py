"""The folder of tuned launch configurations, with one JSON file for each tuned key.

A file has the whole key of the measurement, the choice, and every candidate's median time. It is used only if its key
matches and its choice is one of the candidates. So a bad file can make a kernel slow, but not wrong.

The first process that publishes a choice writes the file. It locks the folder with `flock`, and renames a complete
file. The folder is private to its user, and can be removed safely.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from autoshard.kernels.candidates import Choice
from autoshard.kernels.private_folder import make_private

_IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class Key:
    """The conditions of a measurement.

    Args:
        kernel: the name of the kernel's function.
        facts: all conditions that the fastest choice depends on, as values for JSON: device, versions, arguments.
        candidates: the launch configurations that are measured.
    """

    kernel: str
    facts: Mapping[str, Any]
    candidates: Sequence[Choice]

    @property
    def record(self) -> dict[str, Any]:
        """The key's kernel, facts and candidates as a dict that JSON can represent."""
        return {"kernel": self.kernel, **self.facts, "candidates": [str(choice) for choice in self.candidates]}


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of tuned launch configurations. The folder is made when `publish` or `identity` is first called."""

    folder: Path

    def read(self, key: Key) -> Choice | None:
        """Return the choice that was published for `key`, or None if its file is missing or damaged."""
        try:
            entry = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("key") != key.record:
            return None
        return next((choice for choice in key.candidates if str(choice) == entry.get("choice")), None)

    def publish(self, key: Key, choice: Choice, times_ms: Mapping[Choice, float]) -> Choice:
        """Publish `choice` for `key`, unless another process has published a choice. Return the published choice.

        `times_ms` has the median time of each candidate in milliseconds, for people who read the file. Raise `OSError`
        if the folder cannot be written or locked, and `KernelError` if it is not private to this user.
        """
        times = {str(item): time_ms if math.isfinite(time_ms) else "does not fit" for item, time_ms in times_ms.items()}
        text = json.dumps({"choice": str(choice), "median_ms": times, "key": key.record}, indent=1) + "\n"
        with self._locked():
            known = self.read(key)
            if known is not None:
                return known
            self._replace(self._path(key), text)
        return choice

    def identity(self) -> str:
        """Return a random text that is kept in the folder. Processes that get the same text share their choices.

        Raise `OSError` if the folder cannot be written or locked, and `KernelError` if it is not private to this user.
        """
        path = self.folder / _IDENTITY
        with self._locked():
            if not path.exists():
                self._replace(path, secrets.token_hex(8))
            return path.read_text(encoding="utf-8")

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key.record, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{key.kernel[:100]}_{digest[:16]}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_private(self.folder, "measured block sizes")
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _replace(self, path: Path, text: str) -> None:
        with NamedTemporaryFile("w", encoding="utf-8", dir=self.folder, suffix=".tmp", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
