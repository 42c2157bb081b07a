"""A reply lost between daemon and rank: its plan reaches the rank with a later reply."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import running_daemon, training
from tests.support.waiting import LIMIT_S, wait_until

_CARRIES_A_PLAN = b'"plans":[{'


class CuttingProxy:
    """Passes bytes between ranks and the daemon, and cuts the connection instead of passing on the first plan."""

    def __init__(self, folder: Path, daemon_path: Path) -> None:
        self.socket_path = folder / "proxy.sock"
        self.num_cut = 0
        self._daemon_path = daemon_path
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket_path))
        self._listener.listen(16)
        self._held: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop listening and wait until both sides of every connection are closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        for held in (self._listener, *self._held):
            held.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                rank, _ = self._listener.accept()
                daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._held += [rank, daemon]
                daemon.connect(str(self._daemon_path))
                for source, sink, may_cut in ((rank, daemon, False), (daemon, rank, True)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, may_cut))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, may_cut: bool) -> None:  # noqa: FBT001  a thread's argument
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if may_cut and _CARRIES_A_PLAN in data and self._is_first():
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _is_first(self) -> bool:
        with self._lock:
            self.num_cut += 1
            return self.num_cut == 1


@contextmanager
def cutting_proxy(folder: Path, daemon_path: Path) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(folder, daemon_path)
    try:
        yield proxy
    finally:
        proxy.close()


def test_a_plan_whose_reply_was_lost_still_reaches_every_rank(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, cutting_proxy(tmp_path, daemon.socket_path) as proxy:
        arguments = ("--policy", "uniform", "--socket", str(proxy.socket_path))
        with training(daemon, arguments=arguments) as run:
            # Profiling continues with the next plan only after every rank has run iterations of the previous one.
            wait_until(daemon.is_lowered)
            job = daemon.wait_for_phase("tuned")
            assert run.process.poll() is None

    assert proxy.num_cut > 1
    assert len(job["ranks"]) == 4
