"""Atomic replacement of small files: another process reads either the old or the new content, never a mix."""

import contextlib
import os
from pathlib import Path


def replace_file(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
    is_durable: bool = False,
    is_locked: bool = False,
) -> None:
    """Replace a file; whatever the umask, it is by default readable only by this user.

    A durable file keeps its content after a power failure. If the caller holds a lock against other writers, set
    `is_locked`: a temporary file left by a killed writer is then reused. `owner` is a user id and a group id.

    Raises:
        OSError: the file cannot be written, and the old one stays; or the new one may not survive a power failure.
    """
    unfinished = path.with_name(f".{path.name}.{'unfinished' if is_locked else os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(fd)
        unfinished.replace(path)
        if is_durable:
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
