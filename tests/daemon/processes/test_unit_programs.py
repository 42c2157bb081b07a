"""Main programs of the units: they execute the worker or fetcher, or report an invalid setting in one line."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.daemon.processes import worker_unit
from gpuenergyd.daemon.processes.launch import connect_policy_unit, worker_command
from gpuenergyd.daemon.processes.policy_client import PolicyClient, PolicyFailure
from gpuenergyd.daemon.settings import Processes, Settings, load_settings
from gpuenergyd.errors import UsageError
from gpuenergyd_carbon.fetching import fetcher_process
from tests.daemon.processes.test_policy_host import view
from tests.support.daemon_process import wait_for_death
from tests.support.processes import child_pids
from tests.support.waiting import LIMIT_S, wait_until

_MANAGER = """
import socket, subprocess, sys
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = listener.accept()
    guard = subprocess.Popen([sys.executable, "-I", "-c", sys.argv[2]], stdin=connection, stdout=connection)
    connection.close()
    print(guard.pid, flush=True)
"""


class Replaced(Exception):  # noqa: N818  what execv does to a process is no error
    """Raised instead of replacing this process by another program."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list that receives the executed command line; settings come from the environment only."""
    command: list[str] = []

    def execv(path: str, arguments: Sequence[str]) -> None:
        assert path == arguments[0]
        command.extend(arguments)
        raise Replaced

    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr("gpuenergyd.daemon.settings.SYSTEM_CONFIG_PATH", tmp_path / "none.toml")
    for key in Settings.model_fields:
        monkeypatch.delenv(f"GPUENERGYD_{key.upper()}", raising=False)
    monkeypatch.setenv("GPUENERGYD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("GPUENERGYD_STATE_DIR", str(tmp_path / "state"))
    return command


def test_the_worker_unit_executes_the_worker_with_the_settings(
    program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["worker_unit", "--daemon-user", "gpuenergyd"])

    with pytest.raises(Replaced):
        worker_unit.main()

    assert program == [*worker_command(load_settings()), "--daemon-user", "gpuenergyd"]


def test_the_worker_unit_reports_an_invalid_setting(
    program: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_MODE", "fast")

    with pytest.raises(SystemExit) as ended:
        worker_unit.main()

    assert ended.value.code == UsageError.exit_code
    assert " gpuenergyd-worker: GPUENERGYD_MODE = 'fast': " in capsys.readouterr().err
    assert program == []


def test_the_fetcher_unit_executes_the_fetcher_with_its_configuration_on_standard_input(
    program: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUENERGYD_CARBON_ZONE", "GB")
    with (tmp_path / "stdin").open("w") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(Replaced):
            fetcher_process.main()
        reported = json.loads(os.read(stdin.fileno(), 2**16))

    assert program == [sys.executable, "-I", "-m", "gpuenergyd_carbon.fetching.fetcher"]
    assert reported["zone"] == "GB"
    assert reported["out_path"] == str(load_settings(processes=Processes.UNITS).carbon_file_path)


def test_the_fetcher_unit_exits_normally_without_a_carbon_zone(
    program: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert fetcher_process.main() == 0

    assert "nothing to fetch: carbon_zone is not set" in caplog.text
    assert program == []


def test_the_fetcher_unit_reports_an_invalid_setting(
    program: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUENERGYD_CARBON_BUDGET_RATIO", "-3")

    assert fetcher_process.main() == UsageError.exit_code
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "GPUENERGYD_CARBON_BUDGET_RATIO = '-3'" in caplog.text
    assert program == []


@dataclass(frozen=True, slots=True)
class Unit:
    """A socket, and a manager that starts a guard process per connection, like a socket unit."""

    path: Path
    guard_pids: Path

    def guards(self) -> list[int]:
        """The guards started so far."""
        return [int(line) for line in self.guard_pids.read_text().splitlines()]

    def link(self, *, time_limit_s: float = LIMIT_S) -> PolicyClient:
        return PolicyClient(
            lambda: connect_policy_unit(self.path), time_limit_s=time_limit_s, first_time_limit_s=time_limit_s
        )


@pytest.fixture
def unit(tmp_path: Path, hostile_distribution: Path) -> Iterator[Unit]:
    """A policy host unit that also finds the hostile policies."""
    program = (
        f"import sys; sys.path.insert(0, {str(hostile_distribution)!r});"
        " from gpuenergyd.daemon.processes.policy_unit import main; sys.exit(main())"
    )
    made = Unit(tmp_path / "policy.sock", tmp_path / "guards")
    with socket.socket(socket.AF_UNIX) as listener, made.guard_pids.open("wb") as pids:
        listener.bind(str(made.path))
        listener.listen()
        fd = listener.fileno()
        manager = subprocess.Popen([sys.executable, "-c", _MANAGER, str(fd), program], pass_fds=[fd], stdout=pids)
    yield made
    manager.kill()
    manager.wait(LIMIT_S)


def test_a_connection_gets_plans_and_its_host_ends_with_it(unit: Unit) -> None:
    async def scenario() -> ClockPlan | PolicyFailure:
        link = unit.link()
        plan = await link.next_plan("job", "polite", view())
        await link.close()
        return plan

    assert isinstance(asyncio.run(scenario()), ClockPlan)

    (guard,) = unit.guards()
    wait_for_death(guard)


async def test_a_policy_that_never_returns_is_killed_when_the_connection_closes(unit: Unit) -> None:
    link = unit.link()
    asking = asyncio.create_task(link.next_plan("bad", "loops", view()))
    await asyncio.to_thread(wait_until, lambda: bool(unit.guards() and child_pids(unit.guards()[0])))
    hosts = child_pids(unit.guards()[0])
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    after = await link.next_plan("good", "polite", view())
    await link.close()

    for pid in hosts:
        wait_for_death(pid)
    assert isinstance(after, ClockPlan)
    assert len(unit.guards()) == 2


async def test_without_the_policy_unit_plans_fail_with_a_reason(tmp_path: Path) -> None:
    link = PolicyClient(lambda: connect_policy_unit(tmp_path / "nobody"), time_limit_s=5.0, first_time_limit_s=5.0)
    answer = await link.next_plan("job", "polite", view())

    assert isinstance(answer, PolicyFailure)
    assert "No such file or directory" in answer.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a socket to another user takes root")
def test_a_unit_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    program = (
        "import os, socket, sys\nlistener = socket.socket(socket.AF_UNIX)\nlistener.bind(sys.argv[1])\n"
        "os.setuid(65534)\nlistener.listen()\nprint(flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
        assert theirs.stdout is not None
        theirs.stdout.readline()

        async def scenario() -> ClockPlan | PolicyFailure:
            link = PolicyClient(lambda: connect_policy_unit(path), time_limit_s=5.0, first_time_limit_s=5.0)
            return await link.next_plan("job", "polite", view())

        answer = asyncio.run(scenario())
        theirs.kill()

    assert isinstance(answer, PolicyFailure)
    assert "is served by uid 65534" in answer.reason
