"""Reads profile tables (CSV) and planner instances (JSON) from files."""

from pathlib import Path

from gpuenergyd.errors import ProfileError
from gpuenergyd.wire.instance_json import PlannerInstance, parse_instance
from gpuenergyd.wire.profile_csv import ProfileTable, parse_profile_table

__all__ = ["PlannerInstance", "ProfileTable", "read_pipeline_file"]


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


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ProfileError(f"{path}: is a directory; expected a profile CSV or an instance JSON") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"{path}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not UTF-8 text (byte {error.start})") from None
