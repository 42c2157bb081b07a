"""Atomic replacement of a small file that a later daemon reads."""

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, body: bytes) -> None:
    """Replace a file, readable by this user only: a reader finds the old content or the new one.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
