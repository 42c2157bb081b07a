"""What makes a job go on differently stands in the status, in what people read of it, and in the history."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run as run_command
from gpuenergyd.store import open_history
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import wait_until

UNIFORM = ("--policy", "uniform", "--ranks", "2")


def shown(daemon: DaemonProcess, *options: str) -> str:
    """Return what `gpuenergyd status` prints."""
    text = io.StringIO()
    with redirect_stdout(text):
        run_command(["status", "--socket", str(daemon.socket_path), *options])
    return text.getvalue()


def noticed(daemon: DaemonProcess, job_id: str, what: str) -> Callable[[], bool]:
    """Return whether the job's last notice matches, or one that another has followed since."""
    return lambda: any(
        re.search(what, reason) for reason in ((daemon.job() or {}).get("last_notice") or "", *recorded(daemon, job_id))
    )


def recorded(daemon: DaemonProcess, job_id: str) -> list[str]:
    with open_history(daemon.database_path) as history:
        return [event.reason for event in history.control_events(job_id)]


@pytest.mark.thorough
def test_a_pause_another_order_and_a_larger_batch_are_shown_and_recorded(tmp_path: Path) -> None:
    causes = {name: tmp_path / name for name in ("pause", "swap", "slow")}
    arguments = (*UNIFORM, *(part for name, path in causes.items() for part in (f"--{name}-while", str(path))))
    found: list[tuple[str, str, dict[str, Any]]] = []
    with running_daemon(tmp_path / "daemon") as daemon:
        with training(daemon, arguments=arguments) as run:
            job_id = daemon.wait_for_phase("tuned")["job_id"]
            for name, what in (
                ("pause", r"s passed between iterations \d+ and \d+ \(evaluation"),
                ("swap", "in another order, than were registered"),
                ("slow", "the job changed: .* times as long as before"),
            ):
                causes[name].touch()
                wait_until(noticed(daemon, job_id, what))
                found.append((what, shown(daemon), json.loads(shown(daemon, "--json"))["jobs"][0]))
                if name != "slow":
                    causes[name].unlink()
                    daemon.wait_for_phase("tuned", "trial")
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert daemon.stop() == 0

    reasons = recorded(daemon, job_id)
    for what, text, job in found:
        assert any(re.search(what, reason) for reason in reasons), what
        assert job["last_notice"] in reasons
        assert job["last_notice_iterations_ago"] >= 0
        assert re.search(r"\d iterations? ago:", text)
