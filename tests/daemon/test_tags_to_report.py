"""Tags from the environment of a training process to the groups of a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from tests.support.daemon_process import ROOT, running_daemon
from tests.support.waiting import LIMIT_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """\
import sys

from tests.support.fake_trainer import main

sys.exit(main())
"""


def checked_out_program(folder: Path) -> Path:
    """Write a training program into a git work tree."""
    (folder / ".git" / "refs" / "heads").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    (folder / ".git" / "refs" / "heads" / "main").write_text(f"{COMMIT}\n", encoding="utf-8")
    program = folder / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return program


def grouped(database: Path, tag: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the report command's energy by the values of a tag; on a busy machine it is estimated."""
    capsys.readouterr()
    assert run(["report", "--group-by", "tag", "--tag", tag, "--json", "--database", str(database)]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    return {group["group"]: (group["energy_j"] or 0.0) + (group["estimated_j"] or 0.0) for group in groups}


def test_tags_from_a_training_environment_reach_the_groups_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """User, Slurm job, a user-defined tag and the program's commit: each group has the job's energy."""
    program = checked_out_program(tmp_path / "code")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_USER": "ada",
        "SLURM_JOB_ACCOUNT": "vision",
        "GPUENERGYD_TAGS": "experiment=a7",
    }
    with running_daemon(tmp_path / "daemon") as daemon:
        command = [sys.executable, str(program), "--socket", str(daemon.socket_path), "--world", str(daemon.world_path)]
        command += ["--ranks", "1", "--iterations", "40"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=LIMIT_S)
        assert daemon.stop() == 0

    expected = {
        "user": "ada",
        "slurm_job_id": "4711",
        "slurm_account": "vision",
        "experiment": "a7",
        "git_commit": COMMIT,
        "program": "train.py",
    }
    energies_j = {tag: grouped(daemon.database_path, tag, capsys) for tag in expected}
    assert {tag: value in energies_j[tag] for tag, value in expected.items()} == dict.fromkeys(expected, True)
    own_j = {groups[expected[tag]] for tag, groups in energies_j.items()}
    assert len(own_j) == 1
    assert own_j.pop() > 0.0
