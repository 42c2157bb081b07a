"""Whole proofs in real processes, as a user runs them: a program started anew for each block, or one running job."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_prove.folder import BLOCKS, PAGE, PILOT, VERDICT, read_registration
from gpuenergyd_prove.proof.registration import LEAST_ROUNDS
from tests.support.daemon_process import DaemonProcess, training

SHORT = (
    "--policy", "uniform", "--max-slowdown", "0.5", "--smallest-saving", "0.4", "--block-iterations", "6",
    "--block-limit-s", "300",
)  # fmt: skip
"""As short as a proof can be, and with a slowdown that no busy moment of this machine uses up."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(out: Path, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a finished proof with its design, and its verdict with what `--check` recomputes."""
    lines = capsys.readouterr().out.splitlines()
    key = lines[0].rpartition(" ")[2]
    assert lines[0] == f"SIMULATED: proof in {out}, signed with public key {key}"
    registration = read_registration(out)
    verdict = json.loads((out / VERDICT).read_text())
    assert lines[-1] == verdict["sentence"]
    assert verdict["sentence"].startswith("SIMULATED: ")
    arms = [block["arm"] for block in lines_of(out / BLOCKS)]
    assert arms == list(registration.order())[: len(arms)]
    assert len(arms) >= 2 * registration.design.num_rounds >= 2 * LEAST_ROUNDS
    assert len(lines_of(out / PILOT)) >= 8
    assert verdict["sentence"] in (out / PAGE).read_text().replace("&#x27;", "'")
    # Other work on this machine may disturb so many rounds that there is no verdict; then the check says so, too.
    assert (status == 0) == (verdict["conclusion"] != "no verdict")

    assert run(["prove", "--check", str(out), "--key", key, "--json"]) == status
    assert json.loads(capsys.readouterr().out) == {"holds": True, "problems": [], "verdict": verdict}


@pytest.mark.thorough
def test_proof_of_a_program_ends_in_a_verdict_that_a_check_recomputes(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        sys.executable, "-m", "tests.support.fake_trainer", "--socket", str(daemon.socket_path), "--world",
        str(daemon.world_path), "--ranks", "4", "--microbatches", "4", "--iterations", "100000",
    )  # fmt: skip
    out = tmp_path / "proof"

    status = run(["prove", "--socket", str(daemon.socket_path), *SHORT, "--out", str(out), "--", *program])

    check(out, status, capsys)


@pytest.mark.thorough
def test_proof_in_a_running_job_ends_in_a_verdict_and_releases_the_job(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "proof"
    with training(daemon, arguments=("--microbatches", "4", "--policy", "uniform")):
        daemon.wait_for_phase("baseline", "trial", "tuned")

        status = run(["prove", "--socket", str(daemon.socket_path), *SHORT, "--out", str(out), "--job", "fake"])

        job = daemon.job()
    check(out, status, capsys)
    assert job is not None
    assert all(value is None for value in job["orders"].values())
