"""The logrotate file: valid, and it rotates a log that the daemon keeps open."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "deploy" / "logrotate" / "gpuenergyd"


def test_a_log_that_stays_open_is_rotated_and_goes_on(tmp_path: Path) -> None:
    logrotate = shutil.which("logrotate", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if logrotate is None:
        pytest.skip("logrotate is not installed")
    log, rules = tmp_path / "serve.log", tmp_path / "rules"
    tmp_path.chmod(0o755)
    rules.write_text(FILE.read_text(encoding="utf-8").replace("/var/log/gpuenergyd", str(tmp_path)), encoding="utf-8")
    rules.chmod(0o644)
    command = [logrotate, "--force", "--state", str(tmp_path / "state"), str(rules)]

    with log.open("a", encoding="utf-8") as opened:
        opened.write("first\n")
        opened.flush()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        opened.write("second\n")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "serve.log.1").read_text(encoding="utf-8") == "first\n"
    assert log.read_text(encoding="utf-8") == "second\n"
