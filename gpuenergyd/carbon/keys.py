"""Secrets from files that only their owner can read; a key is read when it is used and never logged."""

import os
import stat
from pathlib import Path

from gpuenergyd.errors import CarbonDataError

_MAX_BYTES = 4096


def read_key(path: Path) -> str:
    """Return the key in a file: its first line that is not blank.

    Raises:
        CarbonDataError: the file is missing, readable by others, not a plain file, or holds no usable key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CarbonDataError(f"key file {path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CarbonDataError(f"key file {path} is no plain file")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(status.st_mode)
            raise CarbonDataError(f"key file {path} has mode {mode:04o}, so others can read it; valid: 0600 or 0400")
        if status.st_uid not in {os.geteuid(), 0}:
            raise CarbonDataError(f"key file {path} belongs to user {status.st_uid}, not to us or root")
        content = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines() if line.strip()]
    if len(content) > _MAX_BYTES or not lines or not lines[0].isascii() or not lines[0].isprintable():
        raise CarbonDataError(f"key file {path} holds no key: one line of printable characters is needed")
    return lines[0]
