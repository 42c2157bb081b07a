"""The check of a container's probes succeeds while the daemon answers, whatever it reports."""

import os
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client import probe
from gpuenergyd.client.connection import DaemonClient, HttpConnection
from gpuenergyd.errors import ProtocolError


@pytest.mark.parametrize("status", [{"is_degraded": False}, {"is_degraded": True}])
def test_a_daemon_that_answers_is_alive_even_if_degraded(
    status: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonClient, "get_status", lambda _: status)

    assert probe.main() == 0


def test_a_daemon_that_does_not_answer_is_not_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_SOCKET", str(tmp_path / "none.sock"))

    assert probe.main() == 3
    assert f"no daemon answers on {tmp_path}/none.sock" in capsys.readouterr().err


def test_a_user_who_may_not_connect_is_named_by_the_uid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(HttpConnection, "request", denied)
    monkeypatch.setenv("GPUENERGYD_SOCKET", "/run/x.sock")

    assert probe.main() == 3
    assert capsys.readouterr().err == (
        f"gpuenergyd: uid {os.geteuid()} may not connect to /run/x.sock (Permission denied):"
        " `gpuenergyd doctor` shows the group that may\n"
    )


def test_a_daemon_with_an_invalid_reply_is_not_alive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def invalid(_: DaemonClient) -> dict[str, Any]:
        raise ProtocolError("invalid reply of the daemon")

    monkeypatch.setattr(DaemonClient, "get_status", invalid)

    assert probe.main() == ProtocolError.exit_code
    assert capsys.readouterr().err == "gpuenergyd: invalid reply of the daemon\n"
