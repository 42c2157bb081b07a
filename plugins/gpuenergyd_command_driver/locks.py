"""Locks that prevent two commands from changing one GPU at the same time, even after the worker was killed."""

import contextlib
import fcntl
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from gpuenergyd.errors import DriverError

_LOCK_PAUSE_S = 0.002
_RUN = Path("/run")


@contextlib.contextmanager
def held_lock(gpu_uuid: str, limit_s: float) -> Iterator[int]:
    """Lock a GPU for one command, which inherits the lock, so that it lasts until the command ends.

    Raises:
        DriverError: a command is still running after its time limit.
    """
    folder = lock_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own_folder(folder)
        fd = os.open(folder / f"{gpu_uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DriverError(f"{folder}: {error.strerror}") from None
    try:
        until_mono_s = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_mono_s:
                    raise DriverError(f"an earlier command of {gpu_uuid} is still running") from None
                time.sleep(_LOCK_PAUSE_S)
        yield fd
    finally:
        os.close(fd)


def lock_folder() -> Path:
    """Return the folder for the locks, inside a folder that other users cannot write to.

    The outer folder is the runtime directory of the systemd unit, which the restoring unit shares, else the user's,
    which does not depend on the environment.

    Raises:
        DriverError: this user has no such folder.
    """
    uid = os.geteuid()
    user_folder = _RUN / "user" / str(uid)
    if runtime_folder := os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]:
        place = Path(runtime_folder)
    elif uid == 0:
        place = _RUN
    elif user_folder.is_dir():
        place = user_folder
    else:
        try:
            place = Path(pwd.getpwuid(uid).pw_dir) / ".cache"
        except KeyError:  # for example in a container run with a uid that has no name
            raise DriverError(
                f"uid {uid} has no home folder for the locks of commands; set RUNTIME_DIRECTORY"
            ) from None
    return place / f"gpuenergyd-commands-{uid}"


def _require_own_folder(folder: Path) -> None:
    """Check that no other user can use a folder, or raise DriverError."""
    status = folder.lstat()
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise DriverError(f"{folder}: not a folder; remove it")
    if status.st_uid != uid or mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DriverError(
            f"{folder}: belongs to uid {status.st_uid} and has mode {mode:04o}; it must belong to uid {uid} and have"
            " mode 0700"
        )
