"""The Slurm epilog that writes a job's energy into its AdminComment, with recorded calls of Slurm's commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT
from tests.support.sample_history import START, write_sample_history

SCRIPT = ROOT / "deploy" / "slurm" / "energy_comment.sh"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def comment_of(folder: Path, *, job_id: str, node: str = "gpu1") -> str:
    """Return the arguments of sacctmgr after the end of a job on gpu1 and gpu2; empty without a call."""
    database = write_sample_history(folder / "history.sqlite3")
    (folder / "prefix" / "bin").mkdir(parents=True)
    program(folder / "prefix" / "bin" / "python", f'exec {sys.executable} "$@"')
    command = f'exec {sys.executable} -m gpuenergyd.cli.main "$@" --database {database}'
    program(folder / "prefix" / "bin" / "gpuenergyd", command)
    program(folder / "scontrol", "echo gpu1; echo gpu2")
    program(folder / "sacctmgr", f'printf "%s\\n" "$@" >{folder / "called"}')
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TZ": "WEST+8",
        "GPUENERGYD_PREFIX": str(folder / "prefix"),
        "GPUENERGYD_COMMENT_DELAY_S": "0",
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURMD_NODENAME": node,
        "SLURM_JOB_START_TIME": str(int(START.timestamp()) - 60),
    }
    assert subprocess.run([SCRIPT], env=environment, check=False, capture_output=True).returncode == 0
    called = folder / "called"
    return called.read_text(encoding="utf-8") if called.exists() else ""


def test_the_first_node_writes_energy_and_saving(tmp_path: Path) -> None:
    assert comment_of(tmp_path, job_id="4711").splitlines() == [
        *("-i", "modify", "job", "where", "jobid=4711", "set"),
        "AdminComment=energy_kwh=0.000801 saved_kwh=0.000060 source=gpuenergyd",
    ]


@pytest.mark.parametrize(("job_id", "node"), [("4711", "gpu2"), ("4712", "gpu1")])
def test_other_nodes_and_jobs_without_energy_write_nothing(tmp_path: Path, job_id: str, node: str) -> None:
    assert not comment_of(tmp_path, job_id=job_id, node=node)
