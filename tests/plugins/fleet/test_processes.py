"""Coordinator, follower and webhook as processes beside a real daemon: a lease comes, and a signed event lowers it."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuenergyd_fleet.webhook import PATH, SIGNATURE_HEADER, TIME_HEADER, signature
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.waiting import LIMIT_S, wait_until

KEY = "0123456789abcdef" * 4


@contextmanager
def _fleet(log: Path, *arguments: str) -> Iterator[None]:
    with log.open("wb") as output:
        command = [sys.executable, "-I", "-m", "gpuenergyd.cli.main", "fleet", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def _budget(daemon: DaemonProcess) -> dict[str, Any]:
    with closing(daemon.client()) as client:
        return client.get("/v1/power-budget")


def _post(port: int, event: dict[str, Any]) -> int:
    body, now = json.dumps(event).encode(), f"{time.time():.0f}"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("POST", PATH, body, {TIME_HEADER: now, SIGNATURE_HEADER: signature(KEY, now, body)})
        return connection.getresponse().status


def test_a_lease_arrives_and_a_signed_event_lowers_it(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    (tmp_path / "host").mkdir()
    with running_daemon(tmp_path / "host", power_budget_w=5000.0) as daemon:
        database = ("--database", str(daemon.status()["files"]["history_path"]))
        set_budget = [sys.executable, "-I", "-m", "gpuenergyd.cli.main", "fleet", "set", "6000", *database]
        subprocess.run(set_budget, check=True)
        socket = ("--socket", str(daemon.socket_path))
        logs = {name: tmp_path / f"{name}.log" for name in ("coordinate", "follow", "listen")}

        def log() -> str:
            return "\n".join(path.read_text() for path in logs.values()) + str(_budget(daemon))

        with (
            _fleet(logs["coordinate"], "coordinate", "--every-s", "0.3", *database),
            _fleet(logs["follow"], "follow", "--host", "a", "--every-s", "0.3", *database, *socket),
            _fleet(logs["listen"], "listen", "--key-file", str(key), "--port", "0", *database),
        ):
            wait_until(lambda: _budget(daemon)["power_budget_w"] == 6000.0, log=log)
            assert _budget(daemon)["reason"] == "fleet"
            wait_until(lambda: "listening on" in logs["listen"].read_text(), log=log)
            port = int(logs["listen"].read_text().partition("127.0.0.1:")[2].partition("/")[0])
            now_at = datetime.now(tz=UTC)
            event = {
                "event_id": "event-17",
                "start": now_at.isoformat(),
                "end": (now_at + timedelta(minutes=10)).isoformat(),
                "value": 4.5,
                "unit": "kW",
            }
            assert _post(port, event) == 200
            wait_until(lambda: _budget(daemon)["power_budget_w"] == 4500.0, log=log)
