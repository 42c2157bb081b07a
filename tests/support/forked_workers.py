"""A pytest plugin that collects the tests once and forks workers, which run whole files: `pytest --workers 6`.

To collect 9,000 tests, with what they import, takes longer than most files of them. A worker takes the next file from a
pipe whenever it begins the last test of one, and sends the reports of its tests to the first process, which hands them
to all other plugins as if it had run the tests itself.
"""

import contextlib
import gc
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.support.fork_server import SERVER, Link, start_servers
from tests.support.forked_policy_host import load_policies

_INDEX_BYTES = 4
_LINKS = pytest.StashKey[list[Link]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers`."""
    parser.addoption("--workers", type=int, default=0, metavar="NUMBER", help="run files of tests in forked workers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Start what forks daemons for the workers: it loads its modules meanwhile."""
    if _has_workers(session.config):
        session.config.stash[_LINKS] = start_servers(session.config.option.workers, has_policies=SERVER.has_policies)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in workers; leave it to pytest where none are wanted."""
    if not _has_workers(session.config) or session.testsfailed or not session.items:
        return None
    if (terminal := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        terminal.showfspath = False  # several files at once
    load_policies()  # with their compiled kernels
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all these objects
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, filling = os.pipe()
    os.write(filling, b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(files))))
    os.close(filling)
    workers: dict[Connection, _Worker] = {}
    try:
        for number, link in enumerate(session.config.stash[_LINKS]):
            _fork(session, workers, files, queue=queue, number=number, link=link)
        reported = _hand_on_reports(session, workers, queue)
    finally:
        os.close(queue)
        for worker in workers.values():
            worker.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    _report_lost(session, reported, list(workers.values()))
    return True


@dataclass(slots=True)
class _Worker:
    """A worker, as the first process knows it."""

    pid: int
    running: str = "no test"
    """The id of the test that it has begun last."""
    status: int | None = None
    has_ended: bool = False

    def end(self) -> None:
        """Wait until it has ended by itself, or end it."""
        if self.status is None:
            if not self.has_ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, 15)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _has_workers(config: pytest.Config) -> bool:
    return config.option.workers > 0 and not config.option.collectonly and not config.option.usepdb


def _fork(
    session: pytest.Session,
    workers: dict[Connection, _Worker],
    files: Sequence[Sequence[pytest.Item]],
    *,
    queue: int,
    number: int,
    link: Link,
) -> None:
    """Fork a worker and add it to the others."""
    # Made here, so that it is new, and old ones are removed.
    folder = session.config._tmp_path_factory.getbasetemp() / f"worker{number}"  # type: ignore[attr-defined]
    folder.mkdir(mode=0o700)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        for other in (receiving, *workers):
            other.close()
        for other_link in session.config.stash[_LINKS]:
            if other_link is not link:
                other_link.close()
        SERVER.connect(link)
        _work(session, _taken(files, queue), sending, folder)
    sending.close()
    workers[receiving] = _Worker(pid)


def _taken(files: Sequence[Sequence[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """Return the tests of the next file that no worker has taken, and so on; a file is taken when it is asked for."""
    while index := os.read(queue, _INDEX_BYTES):
        yield from files[int.from_bytes(index, "big")]


def _work(session: pytest.Session, items: Iterator[pytest.Item], sending: Connection, folder: Path) -> None:
    """Be a worker: run the tests, send their reports, and end."""
    status = 1
    try:
        config = session.config
        if (capture := config.pluginmanager.get_plugin("capturemanager")) is not None:
            capture.stop_global_capturing()  # into files that all processes would share
            capture.start_global_capturing()
            capture.suspend_global_capture()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Reporter(config, sending))
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        status = 0
    except BaseException:  # noqa: BLE001  sent, since a worker must never return to the first process's loop
        sending.send(("start", traceback.format_exc(), None))
    finally:
        os._exit(status)


@dataclass(frozen=True, slots=True)
class _Reporter:
    """The plugin of a worker that sends what its tests report."""

    config: pytest.Config
    sending: Connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Tell which test runs."""
        self.sending.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase of a test."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sending.send(("report", data, None))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Tell which test has ended."""
        self.sending.send(("finish", nodeid, location))


def _hand_on_reports(session: pytest.Session, workers: dict[Connection, _Worker], queue: int) -> set[str]:
    """Give all reports to this process's plugins until all workers have ended; return the ids of the tests."""
    hook = session.config.hook
    reported: set[str] = set()
    while running := [connection for connection, worker in workers.items() if not worker.has_ended]:
        for connection in wait(running):
            assert isinstance(connection, Connection)
            worker = workers[connection]
            try:
                what, content, location = connection.recv()
            except EOFError:
                worker.has_ended = True
                connection.close()
                continue
            if what == "start":
                worker.running = content
            elif what == "finish":
                reported.add(content)
                hook.pytest_runtest_logfinish(nodeid=content, location=location)
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=content)
                hook.pytest_runtest_logreport(report=report)
            if session.shouldfail or session.shouldstop:
                while os.read(queue, 65536):  # no worker takes another file
                    pass
    return reported


def _report_lost(session: pytest.Session, reported: set[str], workers: Sequence[_Worker]) -> None:
    """Report each test that did not run because its worker ended as failed."""
    ends = [f"{worker.running} ended its worker: exit status {worker.status}" for worker in workers if worker.status]
    for item in session.items:
        if item.nodeid not in reported:
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"not run to its end: {'; '.join(ends)}", "call"
            )
            session.config.hook.pytest_runtest_logreport(report=report)
