"""The account file: a running process gets its job's account back after a restart of the daemon."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.daemon.carbon.account_file import AccountFile, SavedAccount, running_processes

OWN_PROCESSES = {0: os.getpid()}
ACCOUNT = SlowdownAccount(120, 60.0, 1.5)
SLOT = WorkSlot(datetime(2030, 1, 1, tzinfo=UTC), 10, 5.0, 900.0, None)


def saved(path: Path, job_name: str = "gpt") -> Path:
    """Save one account of this process, and return the path of the file."""
    job = SavedAccount(job_name, running_processes(OWN_PROCESSES), ACCOUNT, (SLOT,), ((0.5, 90.0),))
    AccountFile(path).save([job])
    return path


def test_a_running_process_takes_its_account_over_once(tmp_path: Path) -> None:
    file = AccountFile(saved(tmp_path / "accounts.json"))

    job = file.take_over("gpt", OWN_PROCESSES)

    assert job is not None
    assert (job.account, job.slots, job.frontier) == (ACCOUNT, (SLOT,), ((0.5, 90.0),))
    assert file.take_over("gpt", OWN_PROCESSES) is None
    assert (tmp_path / "accounts.json").stat().st_mode & 0o777 == 0o600


def test_another_job_or_process_starts_with_an_empty_account(tmp_path: Path) -> None:
    file = AccountFile(saved(tmp_path / "accounts.json"))

    assert file.take_over("bert", OWN_PROCESSES) is None
    assert file.take_over("gpt", {0: os.getppid()}) is None
    assert file.take_over("gpt", {}) is None


def test_an_unclaimed_account_stays_in_the_file_while_its_process_runs(tmp_path: Path) -> None:
    path = saved(tmp_path / "accounts.json")

    AccountFile(path).save([])

    assert AccountFile(path).take_over("gpt", OWN_PROCESSES) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9, "boot_id": "", "jobs": []}', "null"])
def test_an_invalid_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "accounts.json"
    path.write_text(text)

    assert AccountFile(path).take_over("gpt", OWN_PROCESSES) is None


def test_accounts_of_another_boot_are_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path / "accounts.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))

    assert AccountFile(path).take_over("gpt", OWN_PROCESSES) is None


def test_an_unwritable_directory_raises_nothing(tmp_path: Path) -> None:
    AccountFile(tmp_path / "no such folder" / "accounts.json").save([])
