"""Read and write TOML files of hardware: trees of constants, each with value, unit, source and date.

    name = "h100_sxm"
    architecture = "hopper"
    [memory_bytes]
    value = 85_524_150_681
    unit = "B"
    source = "nvidia-smi total 79.65 GiB, ..."
    date = "2026-11-20"

A number that no measurement or datasheet confirms also carries `interval = [low, high]`, its believed range. Constants
common to several files are in a file of their own, which these files name (`architecture`, `fabric`, `network`).
`overlay` adds the constants of such a file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from cost_models.errors import HardwareFileError, UnknownHardwareError

DATA = Path(__file__).parent / "data"
FIELDS = ("value", "unit", "source", "date")


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with its unit, its source, and the date of reading or measurement (ISO date).

    `interval` (low, high) is given if neither a measurement nor a datasheet confirms the value.
    """

    value: float
    unit: str
    source: str
    date: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class HardwareFile:
    """A parsed file: texts (`name`) and constants by dotted path (`peak_flops.bf16`). Errors name its `origin`."""

    texts: Mapping[str, str]
    constants: Mapping[str, Constant]
    origin: str

    def text(self, key: str) -> str:
        """Return a top-level string. Raises HardwareFileError if it is missing."""
        if key not in self.texts:
            raise HardwareFileError(f'{self.origin}: {key!r} is missing; add `{key} = "..."` at its top.')
        return self.texts[key]

    def number(self, path: str, unit: str) -> float:
        """Return the constant at a dotted path. Raises HardwareFileError if it is missing or has another unit."""
        constant = self.constants.get(path)
        if constant is None:
            raise HardwareFileError(
                f"{self.origin}: constant {path!r} is missing; "
                f"add a table [{path}] with {', '.join(FIELDS)} (unit {unit!r})."
            )
        if constant.unit != unit:
            raise HardwareFileError(f"{self.origin}: {path!r} has unit={constant.unit!r}; this model reads {unit!r}.")
        return constant.value

    def count(self, path: str, unit: str) -> int:
        """Return the constant at a dotted path as an int.

        Raises HardwareFileError if the constant is missing, has another unit, or is no whole number.
        """
        value = self.number(path, unit)
        if value != int(value):
            kind = "whole number" if unit == "1" else f"whole number of {unit}"
            raise HardwareFileError(f"{self.origin}: {path!r} has value={value!r}; a {kind} is needed.")
        return int(value)

    def family(self, prefix: str, unit: str) -> dict[str, float]:
        """Return the constants of the table `prefix` by name: {"bf16": ..., "f32": ...} for "peak_flops".

        Raises HardwareFileError if a constant's unit is not `unit`. The dict is empty if the file has no such table.
        """
        keys = [path for path in self.constants if path.startswith(prefix + ".")]
        return {path[len(prefix) + 1 :]: self.number(path, unit) for path in keys}

    def overlay(self, other: HardwareFile, prefix: str = "") -> HardwareFile:
        """Return this file with the texts of `other`, and with its constants below `prefix` ("intra.").

        If both files have a text or constant, this file's own holds.
        """
        below = {prefix + path: constant for path, constant in other.constants.items()}
        return HardwareFile(dict(other.texts) | dict(self.texts), below | dict(self.constants), self.origin)


def check_file(path: object) -> Path:
    """Return the path of a hardware file. Raises HardwareFileError if there is no such file."""
    if not isinstance(path, str | Path):
        raise HardwareFileError(f"path={path!r} is a {type(path).__name__}; pass the path of a file.")
    if not Path(path).is_file():
        raise HardwareFileError(f"There is no file {path} of hardware; `autoshard calibrate --out {path}` writes one.")
    return Path(path)


def read(path: Path) -> HardwareFile:
    """Parse one TOML file.

    Raises HardwareFileError if the file is missing or malformed, or if a value is out of range or lacks unit, source or
    date.
    """
    check_file(path)
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int, size: int) -> HardwareFile:
    """Parse a file, cached by time of change and size, because plans are priced by the thousand."""
    return parse(read_document(path), str(path))


def read_document(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises HardwareFileError if it is malformed, or its tables are nested too deeply."""
    try:
        text = path.read_text(encoding="utf-8")
        if deep := _DEEP_KEY.search(text):  # tomllib's time grows with the square of a key's parts
            raise HardwareFileError(f"{path}: its tables lie in each other too deeply, from {deep[0][:60]!r} on.")
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareFileError(f"{path}: not a TOML file: {error}.") from error
    except (RecursionError, ValueError) as error:  # of a number of thousands of digits, int() says so itself
        raise HardwareFileError(f"{path}: not a file of hardware: {error}.") from error


def parse(document: Mapping[str, object], origin: str) -> HardwareFile:
    """Make a `HardwareFile` from a decoded TOML document. `origin`, such as the file's path, is named in errors."""
    texts = {key: str(value) for key, value in document.items() if not isinstance(value, dict)}
    return HardwareFile(texts, dict(_constants(document, "", origin)), origin)


_MAX_DEPTH = 16
_DEEP_KEY = re.compile(r"(?<![\w'\"-])(?:[\w'\"-]++[ \t]*+\.[ \t]*+){64}")
_LARGEST: Mapping[str, float] = {"s": 1e6}
_LARGEST_OF_OTHERS = 1e24
_RATES = ("B/s", "FLOP/s")
_DIVISORS = (
    *("efficiency", "memory_efficiency", "attention_efficiency", "bandwidth_share", "units", "tile_m", "tile_n"),
    *("misaligned_slowdown", "block_queries", "devices_per_nic"),
)
"""Words in the paths of constants by which the models divide. Zero for such a constant raises HardwareFileError."""


def _constants(table: Mapping[str, object], prefix: str, origin: str) -> Iterator[tuple[str, Constant]]:
    if prefix.count(".") > _MAX_DEPTH:
        raise HardwareFileError(f"{origin}: its tables lie in each other too deeply, from {prefix[:60]!r} on.")
    for key, value in table.items():
        if not isinstance(value, dict):
            continue
        path = prefix + key
        if "value" in value:
            yield path, _constant(value, path, origin)
        elif "unit" in value:
            raise HardwareFileError(f"{origin}: {path} has a unit, but no value; add value = ... to its table.")
        else:
            yield from _constants(value, path + ".", origin)


def _constant(table: Mapping[str, object], path: str, origin: str) -> Constant:
    missing = [field for field in FIELDS if not table.get(field) and table.get(field) != 0]
    if missing:
        raise HardwareFileError(
            f"{origin}: constant {path!r} lacks {', '.join(missing)}; each has {', '.join(FIELDS)}."
        )
    value = table["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HardwareFileError(f"{origin}: constant {path!r} has value={value!r}; a number is needed.")
    _check_range(value, str(table["unit"]), path, origin)
    return Constant(
        value, str(table["unit"]), str(table["source"]), str(table["date"]), _interval(table, value, path, origin)
    )


def _check_range(value: float, unit: str, path: str, origin: str) -> None:
    """Raise `HardwareFileError` for a negative, infinite or unreasonably large number.

    Rates (B/s, FLOP/s) and divisors (`_DIVISORS`) must not be zero either.
    """
    largest = _LARGEST.get(unit, _LARGEST_OF_OTHERS)
    divides = unit in _RATES or any(part in _DIVISORS for part in path.split("."))
    if not 0 <= value <= largest or (divides and not value):
        shown = f"{value:g}" if isinstance(value, float) or value <= 2**63 else "a number of more than 63 bits"
        above = "above 0, and at most" if divides else "from 0 to"
        raise HardwareFileError(
            f"{origin}: constant {path!r} has value={shown} {unit}; a number {above} {largest:g} is needed."
        )


def _interval(table: Mapping[str, object], value: float, path: str, origin: str) -> tuple[float, float] | None:
    interval = table.get("interval")
    if interval is None:
        return None
    match interval:
        case [int() | float() as low, int() | float() as high] if low <= value <= high:
            return float(low), float(high)
    raise HardwareFileError(
        f"{origin}: constant {path!r} has interval={interval!r}; two numbers around value={value!r} are needed."
    )


def names(folder: str) -> tuple[str, ...]:
    """Return the names of the data files in a folder of `data`, e.g. "devices", "nodes" or "networks"."""
    return tuple(sorted(path.stem for path in (DATA / folder).glob("*.toml")))


def load(folder: str, name: str) -> HardwareFile:
    """Read the data file `name` in a folder of `data`, such as "devices" or "nodes".

    Raises UnknownHardwareError, with the known names, if there is no such file.
    """
    if not isinstance(name, str):
        kind = folder.removesuffix("s")
        raise UnknownHardwareError(f"{kind}={name!r} is a {type(name).__name__}; pass the name of a {kind}.")
    if name not in names(folder):
        raise UnknownHardwareError(
            f"No hardware {name!r} in cost_models/data/{folder}. {_suggestion(folder, name)} "
            f"Add cost_models/data/{folder}/{name}.toml, "
            "or measure this machine with `autoshard calibrate` and use Cluster.load(path)."
        )
    return read(DATA / folder / f"{name}.toml")


def _suggestion(folder: str, name: str) -> str:
    """Return an error message's sentence with the known names that resemble `name`, or else with all names."""
    known = names(folder)
    lowered = name.lower()
    near = [item for item in known if lowered and lowered in item] or get_close_matches(lowered, known)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."


def dump(texts: Mapping[str, str], constants: Mapping[str, Constant]) -> str:
    """Return the TOML text of a file that `read` can parse: texts first, then one table for each constant."""
    lines = [f"{key} = {_quote(value)}" for key, value in texts.items()]
    for path, constant in constants.items():
        value = float(constant.value) if isinstance(constant.value, float) else constant.value  # not numpy's float
        lines += ["", f"[{path}]", f"value = {value!r}"]
        lines += [f"{field} = {_quote(getattr(constant, field))}" for field in FIELDS[1:]]
        if constant.interval is not None:
            lines.append(f"interval = {list(constant.interval)!r}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
