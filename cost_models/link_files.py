"""Read a link from a hardware file, and turn a link into the numbers of such a file."""

from __future__ import annotations

from cost_models.constants import HardwareFile
from cost_models.topology import Link, MeasuredCollective, Protocol

_LINK_FIELDS = {  # key in a file: (field of Link, unit)
    "bandwidth": ("bandwidth_bytes_per_s", "B/s"),
    "efficiency": ("efficiency", "1"),
    "in_network_efficiency": ("in_network_efficiency", "1"),
    "latency": ("latency_s", "s"),
    "start": ("start_s", "s"),
    "ramp": ("ramp_bytes", "B"),
    "reduce_scatter_phases": ("reduce_scatter_phases", "1"),
}
_PROTOCOL_FIELDS = {  # key in a file: (field of Protocol, unit)
    "bandwidth_share": ("bandwidth_share", "1"),
    "latency": ("latency_s", "s"),
    "start": ("start_s", "s"),
}

_MEASURED_FIELDS = {  # key in a file: (field of MeasuredCollective, unit)
    "start": ("start_s", "s"),
    "latency": ("latency_s", "s"),
    "bandwidth": ("bandwidth_bytes_per_s", "B/s"),
}


def read_link(file: HardwareFile, prefix: str = "") -> Link:
    """Read the link whose numbers have keys that begin with `prefix` ("intra.").

    Raises HardwareFileError if a number is missing, or has another unit.
    """
    numbers = {name: file.number(f"{prefix}{key}", unit) for key, (name, unit) in _LINK_FIELDS.items()}
    below = f"{prefix}protocol."
    names = dict.fromkeys(path[len(below) :].split(".")[0] for path in file.constants if path.startswith(below))
    measured = f"{prefix}measured."
    known = dict.fromkeys(path[len(measured) :].split(".")[0] for path in file.constants if path.startswith(measured))
    return Link(
        **numbers,
        protocols=tuple(_protocol(file, below, name) for name in names),
        measured=tuple(_measured(file, measured, name) for name in known),
    )


def _measured(file: HardwareFile, below: str, name: str) -> MeasuredCollective:
    fields = {field: file.number(f"{below}{name}.{key}", unit) for key, (field, unit) in _MEASURED_FIELDS.items()}
    return MeasuredCollective(name, **fields)


def _protocol(file: HardwareFile, below: str, name: str) -> Protocol:
    fields = {field: file.number(f"{below}{name}.{key}", unit) for key, (field, unit) in _PROTOCOL_FIELDS.items()}
    return Protocol(name, **fields)


def link_numbers(prefix: str, link: Link) -> dict[str, tuple[float, str]]:
    """Return the numbers of a link as `read_link` reads them: key, which begins with `prefix`, to (value, unit)."""
    numbers = {f"{prefix}{key}": (getattr(link, name), unit) for key, (name, unit) in _LINK_FIELDS.items()}
    for protocol in link.protocols:
        for key, (name, unit) in _PROTOCOL_FIELDS.items():
            numbers[f"{prefix}protocol.{protocol.name}.{key}"] = (getattr(protocol, name), unit)
    for measured in link.measured:
        for key, (name, unit) in _MEASURED_FIELDS.items():
            numbers[f"{prefix}measured.{measured.name}.{key}"] = (getattr(measured, name), unit)
    return numbers
