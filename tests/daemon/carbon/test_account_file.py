"""Slowdown accounts between two cores: kept with the processes they belong to, and believed only for those."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.daemon.carbon.account_file import AccountFile, SavedAccount, identified

MINE = {0: os.getpid()}
ACCOUNT = SlowdownAccount(120, 60.0, 1.5)
SLOT = WorkSlot(datetime(2030, 1, 1, tzinfo=UTC), 10, 5.0, 900.0, None)


def kept(path: Path, job_name: str = "gpt") -> Path:
    """Keep one account of this process as a core does, and return the file."""
    job = SavedAccount(job_name, identified(MINE), ACCOUNT, (SLOT,), ((0.5, 90.0),))
    AccountFile(path).keep([job])
    return path


def test_a_process_that_lives_on_finds_its_account_once(tmp_path: Path) -> None:
    memory = AccountFile(kept(tmp_path / "accounts.json"))

    job = memory.recall("gpt", MINE)

    assert job is not None
    assert (job.account, job.slots, job.frontier) == (ACCOUNT, (SLOT,), ((0.5, 90.0),))
    assert memory.recall("gpt", MINE) is None
    assert (tmp_path / "accounts.json").stat().st_mode & 0o777 == 0o600


def test_another_job_and_another_process_start_with_nothing_spent(tmp_path: Path) -> None:
    memory = AccountFile(kept(tmp_path / "accounts.json"))

    assert memory.recall("bert", MINE) is None
    assert memory.recall("gpt", {0: os.getppid()}) is None
    assert memory.recall("gpt", {}) is None


def test_an_account_nobody_has_come_back_for_is_kept_on_while_its_process_lives(tmp_path: Path) -> None:
    path = kept(tmp_path / "accounts.json")

    AccountFile(path).keep([])

    assert AccountFile(path).recall("gpt", MINE) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9, "boot_id": "", "jobs": []}', "null"])
def test_a_file_that_cannot_be_believed_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "accounts.json"
    path.write_text(text)

    assert AccountFile(path).recall("gpt", MINE) is None


def test_accounts_of_another_boot_belong_to_nobody(tmp_path: Path) -> None:
    path = kept(tmp_path / "accounts.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))

    assert AccountFile(path).recall("gpt", MINE) is None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    AccountFile(tmp_path / "no such folder" / "accounts.json").keep([])
