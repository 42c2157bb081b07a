"""Requests that a GPU's writes into memory give the signal for: sent in time, by a compiled thread or a process."""

import contextlib
import itertools
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuenergyd.client.timing import cuda_writes
from gpuenergyd.client.timing.compiled_thread import VARIABLE, NotCompiledError, start_compiled_thread
from gpuenergyd.client.timing.cuda_writes import CudaCallError, map_memory
from gpuenergyd.client.timing.request_memory import NUM_SLOTS, REACHED, SEQUENCE, SEQUENCE_OFFSET
from gpuenergyd.client.timing.stream_requests import Datagram
from gpuenergyd.client.timing.watched_requests import WatchedRequests
from gpuenergyd.wire.clock_request import DATAGRAM_BYTES, decode_clock_request, pack_clock_request
from tests.support.waiting import LIMIT_S, wait_until

TOKEN = bytes(range(16))


class Stream:
    """A stream that a test lets reach what was launched."""

    def __init__(self) -> None:
        self.launched: list[int] = []

    def map_memory(self, _address: int, _size: int) -> Callable[[int], bool]:
        """Return what launches a write."""

        def write(number: int) -> bool:
            self.launched.append(number)
            return True

        return write


class Request:
    """A request with a clock of its own."""

    num_given_up = 0

    def __init__(self, sm_clock_mhz: int, clock_socket: socket.socket, *, later_delay_ns: int = 0) -> None:
        later_mhz = 1005 if later_delay_ns else 0
        data = pack_clock_request(0, TOKEN, 7, sm_clock_mhz, later_mhz, 0, 0)
        self._datagram = data, sm_clock_mhz, later_delay_ns, clock_socket

    def __call__(self) -> None:
        """Be sent by the test's process, which none of these is."""
        raise AssertionError("not sent by the watcher")

    def datagram(self) -> Datagram:
        """Return what the watcher sends."""
        return self._datagram

    def give_up_socket(self) -> None:
        type(self).num_given_up += 1


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(LIMIT_S)
    with ours, theirs:
        yield ours, theirs


def num_descriptors() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["compiled", "process"])
def requests(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "compiled" and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "1" if request.param == "compiled" else "0")
    stream = Stream()
    made = WatchedRequests(stream.map_memory)
    assert made.is_compiled == (request.param == "compiled")
    num_open = num_descriptors()
    yield SimpleNamespace(made=made, stream=stream, reach=lambda number: made._words.__setitem__(REACHED, number))
    made.close()
    wait_until(lambda: num_descriptors() <= num_open)


def test_requests_are_sent_in_order_once_the_stream_reaches_them(
    requests: Any, sockets: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = sockets
    for sm_clock_mhz in (900, 1200, 1410):
        assert requests.made.put(Request(sm_clock_mhz, ours, later_delay_ns=4_000_000 * (sm_clock_mhz == 1200)))
    before_ns = time.monotonic_ns()
    requests.reach(2)
    first, second = (decode_clock_request(theirs.recv(4096)) for _ in range(2))
    theirs.setblocking(False)

    assert requests.stream.launched == [1, 2, 3]
    assert (first.token, first.request.sm_clock_mhz, first.request.later) == (TOKEN, 900, ())
    assert before_ns <= first.request.sent_mono_ns <= second.request.sent_mono_ns <= time.monotonic_ns()
    assert second.request.later[0].at_mono_ns - second.request.sent_mono_ns == 4_000_000
    with pytest.raises(BlockingIOError):
        theirs.recv(4096)  # the stream has not reached the third one
    theirs.settimeout(LIMIT_S)
    requests.reach(3)
    assert decode_clock_request(theirs.recv(4096)).request.sm_clock_mhz == 1410


def test_prepared_requests_are_sent_as_they_are_put_and_others_in_their_place(
    requests: Any, sockets: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = sockets
    own = [Request(1000 + number, ours) for number in range(NUM_SLOTS + 4)]
    requests.made.prepare(own)
    requests.reach(NUM_SLOTS)
    put = [*own[:3], own[5], own[4], *own[3:6]]
    for request in put:
        assert requests.made.put(request)
    sent = [decode_clock_request(theirs.recv(4096)).request.sm_clock_mhz for _ in put]

    assert sent == [1000 + own.index(request) for request in put]
    assert requests.stream.launched == list(range(1, 1 + len(put)))
    assert requests.made.pop_num_dropped() == 0


def test_requests_go_to_the_newest_socket(requests: Any, sockets: tuple[socket.socket, socket.socket]) -> None:
    pairs = [sockets, *(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))]
    for number, (ours, theirs) in enumerate(pairs, start=1):
        requests.made.put(Request(1000 + number, ours))
        requests.reach(number)
        theirs.settimeout(LIMIT_S)

        assert decode_clock_request(theirs.recv(4096)).request.sm_clock_mhz == 1000 + number
    for held in itertools.chain.from_iterable(pairs[1:]):
        held.close()


def test_requests_beyond_the_memory_are_dropped_and_counted(
    requests: Any, sockets: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = sockets
    for number in range(NUM_SLOTS + 3):
        assert requests.made.put(Request(1 + number, ours))

    assert len(requests.stream.launched) == NUM_SLOTS
    assert requests.made.pop_num_dropped() == 3
    assert requests.made.pop_num_dropped() == 0
    requests.reach(NUM_SLOTS)
    assert [decode_clock_request(theirs.recv(4096)).sequence for _ in range(NUM_SLOTS)] == list(range(1, NUM_SLOTS + 1))


def test_a_broken_socket_is_given_up_and_its_requests_are_counted(
    requests: Any, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = sockets
    monkeypatch.setattr(Request, "num_given_up", 0)
    requests.made.put(Request(900, ours))
    theirs.close()
    requests.reach(1)
    num_dropped = 0

    def is_counted() -> bool:
        nonlocal num_dropped
        num_dropped += int(requests.made.pop_num_dropped())
        return num_dropped == 1

    wait_until(is_counted)
    requests.made.put(Request(900, ours))

    assert Request.num_given_up == 1


def test_a_full_socket_drops_requests_without_giving_it_up(
    requests: Any, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = sockets
    monkeypatch.setattr(Request, "num_given_up", 0)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * DATAGRAM_BYTES)
    requests.made.put(Request(900, ours))
    requests.reach(1)
    wait_until(lambda: requests.made.pop_num_dropped() == 1)
    requests.made.put(Request(900, ours))

    assert Request.num_given_up == 0


def test_a_device_that_refuses_is_asked_for_its_events_from_then_on(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    def refuse(_address: int, _size: int) -> Callable[[int], bool]:
        raise CudaCallError("cuMemHostRegister: error 801")

    made = WatchedRequests(refuse)

    assert not made.put(Request(900, sockets[0]))
    assert not made.put(Request(900, sockets[0]))


def test_the_compiled_thread_is_refused_from_a_folder_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "gpuenergyd").mkdir()
    (tmp_path / "gpuenergyd").chmod(0o777)

    with pytest.raises(NotCompiledError, match="can be written by other users"):
        start_compiled_thread(0, {"XDG_CACHE_HOME": str(tmp_path)})


def test_without_a_compiler_there_is_no_compiled_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(NotCompiledError, match="there is no C compiler"):
        start_compiled_thread(0, {"XDG_CACHE_HOME": str(tmp_path)})


class Driver:
    """The functions of the CUDA driver that are called, with the statuses that they return."""

    def __init__(self, **statuses: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._statuses = statuses
        self.cuMemHostRegister_v2 = lambda *args: self._called("register", *(one.value for one in args))
        self.cuMemHostGetDevicePointer_v2 = self._get_pointer
        self.cuStreamWriteValue32_v2 = self._Write(self)

    class _Write:
        argtypes: Any = None

        def __init__(self, driver: "Driver") -> None:
            self._driver = driver

        def __call__(self, *args: int) -> int:
            """Be called with plain numbers."""
            return self._driver._called("write", *args)

    def _get_pointer(self, pointer: Any, address: Any, flags: Any) -> int:
        pointer._obj.value = 0xD000
        return self._called("pointer", address.value, flags.value)

    def _called(self, name: str, *args: Any) -> int:
        self.calls.append((name, *args))
        return self._statuses.get(name, 0)


def test_cuda_writes_numbers_to_registered_memory_on_the_current_stream() -> None:
    driver, streams = Driver(), iter((5, 6))
    write = map_memory(0x1000, 4096, lambda: next(streams), load=lambda name: {cuda_writes.LIBRARY: driver}[name])

    assert write(1)
    assert write(2)
    assert driver.calls == [
        ("register", 0x1000, 4096, 3),
        ("pointer", 0x1000, 0),
        ("write", 5, 0xD000, 1, 0),
        ("write", 6, 0xD000, 2, 0),
    ]


@pytest.mark.parametrize(("name", "function"), [("register", "Register"), ("pointer", "GetDevicePointer")])
def test_a_refusal_of_cuda_is_named(name: str, function: str) -> None:
    with pytest.raises(CudaCallError, match=f"{function}: error 801"):
        map_memory(0x1000, 4096, lambda: 0, load=lambda _: Driver(**{name: 801}))


def test_a_write_that_cuda_refuses_is_reported() -> None:
    assert not map_memory(0x1000, 4096, lambda: 0, load=lambda _: Driver(write=801))(1)


def test_the_number_and_instants_of_a_datagram_are_where_they_are_written() -> None:
    datagram = bytearray(pack_clock_request(0, TOKEN, 7, 900, 1005, 0, 0))
    struct.pack_into("<QQ", datagram, 32, 2_000, 1_000)
    struct.pack_into(SEQUENCE, datagram, SEQUENCE_OFFSET, 0xFFFFFFFE)
    _, sequence, request = decode_clock_request(bytes(datagram))

    assert (sequence, request.sent_mono_ns, request.later[0].at_mono_ns) == (0xFFFFFFFE, 1_000, 2_000)
