"""Reads profile tables (CSV), orders (CSV) and planner instances (JSON) from files."""

from pathlib import Path

from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.errors import ProfileError
from gpuenergyd.wire.csv_rows import csv_rows
from gpuenergyd.wire.instance_json import PlannerInstance, parse_instance
from gpuenergyd.wire.order_csv import parse_order
from gpuenergyd.wire.profile_csv import ProfileTable, parse_profile_table
from gpuenergyd.wire.values import number, whole

__all__ = ["PlannerInstance", "ProfileTable", "read_order_file", "read_pipeline_file", "read_waiting_power_file"]


def read_pipeline_file(path: Path) -> ProfileTable | PlannerInstance:
    """Return the profile table or planner instance in a file; the format is detected from its first character.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    text = _read_text(path)
    if not text.strip():
        raise ProfileError(f"{path}: the file is empty; expected a profile CSV or an instance JSON")
    if text.lstrip()[0] in "{[" or path.suffix.lower() == ".json":
        return parse_instance(path, text)
    return parse_profile_table(path, text)


def read_order_file(path: Path, num_stages: int) -> Schedule:
    """Return the order of instructions in a CSV file, for a pipeline with so many stages.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    return parse_order(path, _read_text(path, "an order CSV"), num_stages)


def read_waiting_power_file(path: Path) -> WaitingPower:
    """Return the power of a waiting GPU by clock from CSV rows `frequency,power`, in MHz and W.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    rows = csv_rows(path, _read_text(path, "a CSV of frequency,power"), ("frequency", "power"))
    points = ((whole(at, "frequency", row["frequency"]), number(at, "power", row["power"])) for at, row in rows)
    return waiting_power(points, where=str(path))


def _read_text(path: Path, expected: str = "a profile CSV or an instance JSON") -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ProfileError(f"{path}: is a directory; expected {expected}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"{path}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not UTF-8 text (byte {error.start})") from None
