"""A register that all ranks of a training on one host share: who has a plan with an order, and what was decided.

It is a file in shared memory, locked for a few microseconds at each begin of an iteration once a rank has a plan with
an order. The lock of a process that dies is released by the kernel. The file's name is drawn by the daemon for this
training alone, and the file is unlinked as soon as all ranks have opened it.

Of a training on several hosts each has a register of its own, which also holds the windows that the host has promised
(`gpuenergyd.core.distributed.order_windows`).
"""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from gpuenergyd.core.distributed.order_consent import MAX_TURNS, Turn, is_agreed
from gpuenergyd.core.distributed.order_windows import HostOffer, OrderWindow, common_turns, has_orders_within
from gpuenergyd.count_text import count_text

_FOLDER = Path("/dev/shm")  # noqa: S108  names cannot be guessed, and owner and kind are checked
_HEADER = struct.Struct("<8sq")
_MAGIC = b"GEDorder"
_DECISION = struct.Struct("<qq")
_NUM_DECISIONS = 64
"""Iterations whose decisions are kept: programs that launch ahead of their GPUs may be some iterations apart."""
_WINDOW = struct.Struct("<4q")
"""Number + 1, 0 for none; begin; end; verdict."""
_NUM_WINDOWS = 4
"""Windows that are kept: the one that runs, the one that follows, and those before."""
_HOST = struct.Struct("<4q")
"""Newest iteration begun + 1; number of the newest promise + 1; whether the host promises nothing any more; newest
iteration in doubt + 1."""
_HOST_BEGIN = _HEADER.size + _NUM_DECISIONS * _DECISION.size
_WINDOWS_BEGIN = _HOST_BEGIN + _HOST.size
_SLOTS_BEGIN = _WINDOWS_BEGIN + _NUM_WINDOWS * _WINDOW.size
_SLOT = struct.Struct(f"<qq{2 * MAX_TURNS}q")


class WindowVerdict(IntEnum):
    """What is known of a window that this host has promised."""

    OPEN = 0
    GRANTED = 1
    REFUSED = 2


class OrderRegister:
    """One rank's access to the register of its training; `host` is its number, None where there is one alone.

    Raises:
        OSError: there is no shared memory, or the file belongs to somebody else.
        ValueError: another rank counts other ranks.
    """

    def __init__(
        self,
        training_id: str,
        rank: int,
        num_ranks: int,
        folder: Path = _FOLDER,
        *,
        host: int | None = None,
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._is_across_hosts = host is not None
        """Whether the training has other hosts, which must run their orders in an iteration, too."""
        self.bound_until = 0
        """The iteration after the last one that this host has promised, as this rank saw it last."""
        # Launchers may start several hosts' processes on one machine, with one daemon.
        self._path = folder / f"gpuenergyd-{os.getuid()}-{training_id}{'' if host is None else f'-{host}'}"
        self._is_named = True
        self._num_bytes = _SLOTS_BEGIN + num_ranks * _SLOT.size
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
            raise ValueError(
                f"{self._path} is for {count_text(num_ranks, 'rank')}; this training has {self._num_ranks}"
            )
        return mmap.mmap(self._fd, self._num_bytes)

    def state(self, turns: tuple[Turn, ...]) -> None:
        """State for which iterations this rank has a plan with an order."""
        numbers = [number for begin, is_ordered in turns for number in (begin, int(is_ordered))]
        numbers += [0] * (2 * MAX_TURNS - len(numbers))
        with self._locked():
            _SLOT.pack_into(self._map, self._slot_begin(self._rank), 1, len(turns), *numbers)

    def decide(self, iteration_index: int) -> bool | None:
        """Return whether all ranks run their orders in an iteration, which this rank begins now.

        None while this host is in doubt: it has promised a window of other hosts whose verdict it does not know.
        """
        begin = _HEADER.size + iteration_index % _NUM_DECISIONS * _DECISION.size
        with self._locked():
            decided_for, is_ordered = _DECISION.unpack_from(self._map, begin)
            if decided_for == iteration_index + 1:
                return bool(is_ordered)
            if decided_for > iteration_index + 1:
                return False  # far behind: what was decided is not known any more
            slots = self._slots()
            if self._is_across_hosts:
                windows = self._windows()
                self.bound_until = max(
                    (own.end_iteration for own, verdict in windows if verdict is not WindowVerdict.REFUSED), default=0
                )
                window = next((own for own in windows if own[0].covers(iteration_index)), None)
                if window is not None and window[1] is WindowVerdict.OPEN:
                    newest, promised, is_barred, _ = _HOST.unpack_from(self._map, _HOST_BEGIN)
                    if not is_barred:
                        _HOST.pack_into(self._map, _HOST_BEGIN, newest, promised, 0, iteration_index + 1)
                        return None
                is_ordered = window is not None and window[1] is WindowVerdict.GRANTED
            else:
                is_ordered = is_agreed((_turns(slot) for slot in slots), iteration_index)
            self._record(iteration_index, is_ordered=is_ordered)
        if self._is_named and all(slot[0] for slot in slots):
            self._unlink()
        return bool(is_ordered)

    def give_up(self, iteration_index: int) -> bool:
        """Decide against orders in an iteration that has been in doubt for too long, and promise nothing any more.

        Return the decision, which another rank may have made before.
        """
        if (decided := self.decide(iteration_index)) is not None:
            return decided
        with self._locked():
            newest, promised, _, in_doubt = _HOST.unpack_from(self._map, _HOST_BEGIN)
            _HOST.pack_into(self._map, _HOST_BEGIN, newest, promised, 1, in_doubt)
            self._record(iteration_index, is_ordered=False)
        return False

    def offer(self) -> HostOffer:
        """Return what this host publishes for the others."""
        with self._locked():
            newest, promised, is_barred, _ = _HOST.unpack_from(self._map, _HOST_BEGIN)
            return HostOffer(newest - 1, () if is_barred else self._common_turns(), promised - 1)

    def promise(self, window: OrderWindow) -> bool:
        """Promise a window if all ranks have orders in it, none has begun, and no other one is open; return whether."""
        with self._locked():
            newest, promised, is_barred, in_doubt = _HOST.unpack_from(self._map, _HOST_BEGIN)
            if promised == window.number + 1:
                return True
            begin, end = window.begin_iteration, window.end_iteration
            is_open = any(verdict is WindowVerdict.OPEN for _, verdict in self._windows())
            if is_barred or is_open or promised > window.number or newest > begin:
                return False
            if not has_orders_within(self._common_turns(), begin, end):
                return False
            self._write(window, WindowVerdict.OPEN)
            _HOST.pack_into(self._map, _HOST_BEGIN, newest, window.number + 1, 0, in_doubt)
        return True

    def open_window(self) -> tuple[OrderWindow, bool] | None:
        """Return the window whose verdict this host does not know, and whether a rank waits for it; else None."""
        with self._locked():
            *_, in_doubt = _HOST.unpack_from(self._map, _HOST_BEGIN)
            found = next((window for window, verdict in self._windows() if verdict is WindowVerdict.OPEN), None)
        return None if found is None else (found, found.covers(in_doubt - 1))

    def settle(self, number: int, *, is_granted: bool) -> None:
        """Record the verdict on a window."""
        with self._locked():
            for window, verdict in self._windows():
                if window.number == number and verdict is WindowVerdict.OPEN:
                    self._write(window, WindowVerdict.GRANTED if is_granted else WindowVerdict.REFUSED)

    def is_bound(self, iteration_index: int) -> bool:
        """Return whether this host has promised a window that is neither refused nor over after an iteration."""
        with self._locked():
            return any(
                verdict is not WindowVerdict.REFUSED and window.end_iteration > iteration_index
                for window, verdict in self._windows()
            )

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

    def _record(self, iteration_index: int, *, is_ordered: bool) -> None:
        begin = _HEADER.size + iteration_index % _NUM_DECISIONS * _DECISION.size
        _DECISION.pack_into(self._map, begin, iteration_index + 1, int(is_ordered))
        newest, *others = _HOST.unpack_from(self._map, _HOST_BEGIN)
        _HOST.pack_into(self._map, _HOST_BEGIN, max(newest, iteration_index + 1), *others)

    def _windows(self) -> list[tuple[OrderWindow, WindowVerdict]]:
        """Return the windows promised last, with what is known of them."""
        rows = [_WINDOW.unpack_from(self._map, _WINDOWS_BEGIN + k * _WINDOW.size) for k in range(_NUM_WINDOWS)]
        return [(OrderWindow(row[0] - 1, row[1], row[2]), WindowVerdict(row[3])) for row in rows if row[0]]

    def _write(self, window: OrderWindow, verdict: WindowVerdict) -> None:
        begin = _WINDOWS_BEGIN + window.number % _NUM_WINDOWS * _WINDOW.size
        numbers = window.number + 1, window.begin_iteration, window.end_iteration, int(verdict)
        _WINDOW.pack_into(self._map, begin, *numbers)

    def _slots(self) -> list[tuple[int, ...]]:
        return [_SLOT.unpack_from(self._map, self._slot_begin(rank)) for rank in range(self._num_ranks)]

    def _common_turns(self) -> tuple[Turn, ...]:
        return common_turns([_turns(slot) for slot in self._slots()])

    def _slot_begin(self, rank: int) -> int:
        return _SLOTS_BEGIN + rank * _SLOT.size

    def _unlink(self) -> None:
        if self._is_named:
            self._is_named = False
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _turns(slot: tuple[int, ...]) -> list[Turn]:
    _, num_turns, *numbers = slot
    return [(numbers[2 * k], bool(numbers[2 * k + 1])) for k in range(num_turns)]
