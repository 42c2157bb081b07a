"""Tables of policy options: the policy checks them when the daemon starts."""

from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cost": {"eta": 7}}, r"[policy.cost]: UsageError: policy cost: eta = 7: must be a number from 0 to 1"),
        ({"nobody": {"eta": 1}}, "no policy 'nobody'; installed: "),
    ],
)
def test_a_daemon_with_an_invalid_option_does_not_start(tmp_path: Path, options: object, text: str) -> None:
    daemon = DaemonProcess(tmp_path, overrides={"policy_options": options})

    process = daemon.launch()

    assert process.wait(LIMIT_S) != 0
    assert text in daemon.log
