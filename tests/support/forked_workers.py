"""A pytest plugin that collects the tests once and forks workers, which run whole files: `pytest --workers 6`.

To collect 9,000 tests, with what they import, takes longer than to run most files of them. A worker takes the next file
from a pipe when it begins the last test of one, and sends the reports of its tests to the first process, whose other
plugins get them as if it had run the tests itself.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import SERVER, Link, start_servers

Files = Sequence[Sequence[pytest.Item]]
_INDEX_BYTES = 4
_LINKS = pytest.StashKey[list[Link]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers`."""
    parser.addoption("--workers", type=int, default=0, metavar="NUMBER", help="run files of tests in forked workers")


def _has_workers(config: pytest.Config) -> bool:
    return config.option.workers > 0 and not config.option.collectonly and not config.option.usepdb


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Start what forks the workers' daemons: it loads its modules during the collection."""
    if _has_workers(session.config):
        output = session.config._tmp_path_factory.getbasetemp() / "fork-servers"  # type: ignore[attr-defined]
        session.config.stash[_LINKS] = start_servers(
            session.config.option.workers, has_policies=SERVER.has_policies, output=output
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in workers; leave it to pytest where none are wanted."""
    if not _has_workers(session.config) or session.testsfailed or not session.items:
        return None
    if (terminal := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        terminal.showfspath = False  # several files at once
    if SERVER.has_policies:
        import_module("tests.support.forked_helpers").load_policies()  # with their compiled kernels
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all these objects
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, filling = os.pipe()
    os.write(filling, b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(files))))
    os.close(filling)
    workers: list[_Worker] = []
    try:
        for link in session.config.stash[_LINKS]:
            workers.append(_forked(session, files, queue, link, workers))
        reported = _hand_on_reports(session, workers, queue)
    finally:
        os.close(queue)
        for worker in workers:
            worker.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    ends = [f"{worker.running} ended its worker: exit status {worker.status}" for worker in workers if worker.status]
    for item in session.items:
        if item.nodeid not in reported:
            why = f"not run to its end: {'; '.join(ends)}"
            lost = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            session.config.hook.pytest_runtest_logreport(report=lost)
    return True


@dataclass(slots=True)
class _Worker:
    """A worker, as the first process knows it."""

    pid: int
    reports: Connection
    running: str = "no test"
    """The id of the test that it has begun last."""
    has_ended: bool = False
    status: int | None = None

    def end(self) -> None:
        """Wait until it has ended by itself, or end it."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # a test may ignore other signals
        self.reports.close()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _forked(session: pytest.Session, files: Files, queue: int, link: Link, others: Sequence[_Worker]) -> _Worker:
    # The folder for temporary files is made here: it is new, and old ones are removed.
    folder = session.config._tmp_path_factory.getbasetemp() / f"worker{len(others)}"  # type: ignore[attr-defined]
    folder.mkdir(mode=0o700)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        for connection in (receiving, *(other.reports for other in others)):
            connection.close()
        for other_link in session.config.stash[_LINKS]:
            if other_link is not link:
                other_link.close()
        SERVER.connect(link)
        _work(session.config, _taken(files, queue), sending, folder)
    sending.close()
    return _Worker(pid, receiving)


def _taken(files: Files, queue: int) -> Iterator[pytest.Item]:
    """Yield the tests of the next file that no worker has taken, and so on; a file is taken when it is asked for."""
    while index := os.read(queue, _INDEX_BYTES):
        yield from files[int.from_bytes(index, "big")]


def _work(config: pytest.Config, items: Iterator[pytest.Item], sending: Connection, folder: Path) -> None:
    """Be a worker: run the tests, send their reports, and end."""
    status = 1
    try:
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

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.sending.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sending.send(("report", data, None))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.sending.send(("finish", nodeid, location))


def _hand_on_reports(session: pytest.Session, workers: Sequence[_Worker], queue: int) -> set[str]:
    """Give all reports to this process's plugins until all workers have ended; return the ids of the tests."""
    hook = session.config.hook
    reported: set[str] = set()
    while running := {worker.reports: worker for worker in workers if not worker.has_ended}:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            try:
                what, content, location = connection.recv()
            except EOFError:
                running[connection].has_ended = True
                continue
            if what == "start":
                running[connection].running = content
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
