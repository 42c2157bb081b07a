"""Keys from files that only their owner can read; keys are never logged."""

import os
import stat
from pathlib import Path

from gpuenergyd.errors import CarbonDataError

_MAX_BYTES = 4096


def read_key(path: Path) -> str:
    """Return the key in a file: its first non-blank line.

    Raises:
        CarbonDataError: the file is missing, readable by others, not a regular file, or has no usable key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CarbonDataError(f"key file {path}: {error.strerror}") from None
    try:
        _require_private(path, os.fstat(descriptor))
        content = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines() if line.strip()]
    if len(content) > _MAX_BYTES or not lines or not lines[0].isascii() or not lines[0].isprintable():
        raise CarbonDataError(f"key file {path} has no key; expected one line of printable ASCII characters")
    return lines[0]


def require_private_key_file(path: Path) -> None:
    """Check that a PEM key file, which a library reads, is readable only by its owner.

    Raises:
        CarbonDataError: the file is missing, readable by others, or not a regular file.
    """
    try:
        _require_private(path, path.stat())
    except OSError as error:
        raise CarbonDataError(f"key file {path}: {error.strerror}") from None


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CarbonDataError(f"key file {path} is not a regular file")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise CarbonDataError(f"key file {path} has mode {mode:04o} and is open to others; valid: 0600 or 0400")
    if status.st_uid not in {os.geteuid(), 0}:
        raise CarbonDataError(f"key file {path} belongs to uid {status.st_uid}; valid: uid {os.geteuid()} or root")
