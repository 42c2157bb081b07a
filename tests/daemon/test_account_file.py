"""The account file: a running process gets its job's account back after a restart of the daemon."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.job.time_account import AccountTotals
from gpuenergyd.daemon.account_file import AccountFile, FileContent, SavedAccount, running_processes
from gpuenergyd_carbon.accounts import SavedSlowdown
from gpuenergyd_carbon.rules.slowdown_account import SlowdownAccount

OWN_PROCESSES = {0: os.getpid()}
SLOT = WorkSlot(datetime(2030, 1, 1, tzinfo=UTC), 10, 5.0, 900.0, None)
ACCOUNT = SavedSlowdown(SlowdownAccount(120, 60.0, 1.5), (SLOT,), ((0.5, 90.0),))


def account_file(path: Path) -> AccountFile[SavedSlowdown]:
    return AccountFile(path, FileContent[SavedSlowdown], what="slowdown accounts")


def saved(path: Path, job_name: str = "gpt") -> Path:
    account_file(path).save([SavedAccount(job_name, running_processes(OWN_PROCESSES), ACCOUNT)])
    return path


def test_a_running_process_takes_its_account_over_once(tmp_path: Path) -> None:
    file = account_file(saved(tmp_path / "accounts.json"))

    account = file.take_over("gpt", OWN_PROCESSES)

    assert account == ACCOUNT
    assert file.take_over("gpt", OWN_PROCESSES) is None
    assert (tmp_path / "accounts.json").stat().st_mode & 0o777 == 0o600


def test_another_job_or_process_starts_with_an_empty_account(tmp_path: Path) -> None:
    file = account_file(saved(tmp_path / "accounts.json"))

    assert file.take_over("bert", OWN_PROCESSES) is None
    assert file.take_over("gpt", {0: 1}) is None
    assert file.take_over("gpt", {}) is None


def test_an_unclaimed_account_stays_in_the_file_while_its_process_runs(tmp_path: Path) -> None:
    path = saved(tmp_path / "accounts.json")

    account_file(path).save([])

    assert account_file(path).take_over("gpt", OWN_PROCESSES) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9, "boot_id": "", "jobs": []}', "null"])
def test_an_invalid_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "accounts.json"
    path.write_text(text)

    assert account_file(path).take_over("gpt", OWN_PROCESSES) is None


def test_accounts_of_another_boot_are_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path / "accounts.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))

    assert account_file(path).take_over("gpt", OWN_PROCESSES) is None


def test_another_kind_of_accounts_is_kept_in_the_same_way(tmp_path: Path) -> None:
    totals = AccountTotals(100.0, 2.0, 0.4, None, 90, 7)
    path, kind = tmp_path / "time.json", FileContent[AccountTotals]
    AccountFile(path, kind, what="time accounts").save([SavedAccount("gpt", running_processes(OWN_PROCESSES), totals)])

    assert AccountFile(path, kind, what="time accounts").take_over("gpt", OWN_PROCESSES) == totals


def test_an_unwritable_directory_raises_nothing(tmp_path: Path) -> None:
    account_file(tmp_path / "no such folder" / "accounts.json").save([])
