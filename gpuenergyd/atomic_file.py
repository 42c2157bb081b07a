"""Atomic replacement of small files: another process reads the old content or the new one, never half of it."""

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, is_durable: bool = False) -> None:
    """Replace a file, by default readable by this user only, whatever the umask.

    A durable one has its content also after a power failure.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(fd)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
