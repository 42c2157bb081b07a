"""`gpuenergyd budget`: set, show and clear the power budget of a running daemon, with one-line refusals."""

import json
from collections.abc import Iterator

import pytest

from gpuenergyd.cli.main import run
from tests.support.daemon_process import DaemonProcess, running_daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("budget")) as daemon:
        yield daemon


def test_set_show_and_clear(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    socket = ["--socket", str(daemon.socket_path)]
    assert run(["budget", "show", *socket]) == 0
    assert capsys.readouterr().out == "no power budget\n"
    assert run(["budget", "set", "5000", "--for", "600", "--reason", "grid event 17", *socket]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("power budget: 5000 W until 2")
    assert "from the request (grid event 17)" in printed
    assert "nothing is lowered beyond plans; lowered 0 times" in printed
    assert run(["budget", "show", "--json", *socket]) == 0
    assert json.loads(capsys.readouterr().out)["power_budget_w"] == 5000.0
    assert run(["budget", "clear", *socket]) == 0
    assert capsys.readouterr().out == "no power budget\n"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["nan"], "WATTS nan W: valid are finite values above 0"),
        (["--", "-5"], "WATTS -5 W"),
        (["0"], "WATTS 0 W"),
        (["100", "--for", "-1"], "lifetime_s = -1"),
    ],
)
def test_impossible_values_are_named(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: str
) -> None:
    assert run(["budget", "set", "--socket", str(daemon.socket_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert wrong in error
    assert error.count("\n") == 1
