"""A register that all ranks of a training on one host share: who has a plan with an order, and what was decided.

It is a file in shared memory, locked for a few microseconds at each begin of an iteration once a rank has a plan with
an order. The lock of a process that dies is released by the kernel. The file's name is drawn by the daemon for this
training alone, and the file is unlinked as soon as all ranks have opened it.
"""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuenergyd.core.distributed.order_consent import MAX_TURNS, Turn, is_agreed

_FOLDER = Path("/dev/shm")  # noqa: S108  names cannot be guessed, and owner and kind are checked
_HEADER = struct.Struct("<8sq")
_MAGIC = b"GEDorder"
_DECISION = struct.Struct("<qq")
_NUM_DECISIONS = 64
"""Iterations whose decisions are kept: programs that launch ahead of their GPUs may be some iterations apart."""
_SLOT = struct.Struct(f"<qq{2 * MAX_TURNS}q")


class OrderRegister:
    """One rank's access to the register of its training.

    Raises:
        OSError: there is no shared memory, or the file belongs to somebody else.
        ValueError: another rank counts other ranks.
    """

    def __init__(self, training_id: str, rank: int, num_ranks: int, folder: Path = _FOLDER) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._path = folder / f"gpuenergyd-{os.getuid()}-{training_id}"
        self._is_named = True
        self._num_bytes = _HEADER.size + _NUM_DECISIONS * _DECISION.size + num_ranks * _SLOT.size
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._map = self._mapped()
        except BaseException:
            os.close(self._fd)
            raise

    def _mapped(self) -> mmap.mmap:
        status = os.fstat(self._fd)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise OSError(f"{self._path} belongs to uid {status.st_uid}, or is no file")
        with self._locked():
            if os.fstat(self._fd).st_size == 0:
                os.ftruncate(self._fd, self._num_bytes)
                os.pwrite(self._fd, _HEADER.pack(_MAGIC, self._num_ranks), 0)
            magic, num_ranks = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        if magic != _MAGIC or num_ranks != self._num_ranks:
            raise ValueError(f"{self._path} is for {num_ranks} ranks; this training has {self._num_ranks}")
        return mmap.mmap(self._fd, self._num_bytes)

    def state(self, turns: tuple[Turn, ...]) -> None:
        """State for which iterations this rank has a plan with an order."""
        numbers = [number for begin, is_ordered in turns for number in (begin, int(is_ordered))]
        numbers += [0] * (2 * MAX_TURNS - len(numbers))
        with self._locked():
            _SLOT.pack_into(self._map, self._slot_begin(self._rank), 1, len(turns), *numbers)

    def decide(self, iteration_index: int) -> bool:
        """Return whether all ranks run their orders in an iteration, which this rank begins now."""
        begin = _HEADER.size + iteration_index % _NUM_DECISIONS * _DECISION.size
        with self._locked():
            decided_for, is_ordered = _DECISION.unpack_from(self._map, begin)
            if decided_for == iteration_index + 1:
                return bool(is_ordered)
            if decided_for > iteration_index + 1:
                return False  # far behind: what was decided is not known any more
            slots = [_SLOT.unpack_from(self._map, self._slot_begin(rank)) for rank in range(self._num_ranks)]
            is_ordered = is_agreed((_turns(slot) for slot in slots), iteration_index)
            _DECISION.pack_into(self._map, begin, iteration_index + 1, int(is_ordered))
        if self._is_named and all(slot[0] for slot in slots):
            self._unlink()
        return bool(is_ordered)

    def close(self) -> None:
        """State that this rank has no plan with an order, and give the register up."""
        self.state(())
        self._unlink()
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _slot_begin(self, rank: int) -> int:
        return _HEADER.size + _NUM_DECISIONS * _DECISION.size + rank * _SLOT.size

    def _unlink(self) -> None:
        if self._is_named:
            self._is_named = False
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _turns(slot: tuple[int, ...]) -> list[Turn]:
    _, num_turns, *numbers = slot
    return [(numbers[2 * k], bool(numbers[2 * k + 1])) for k in range(num_turns)]
