"""`plan --job` and `explain --job` on a running job: they agree with the plan in force and an exported profile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd.gpu.drivers.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.registration import one_stage_registration
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with a tuned job of four stages."""
    with (
        running_daemon(tmp_path_factory.mktemp("running-job"), kind=WorldKind.KIND) as made,
        training(made, arguments=("--microbatches", "8")) as run_of_job,
    ):
        made.wait_for_phase("tuned")
        yield made
        run_of_job.finish()


def figures(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what a command shows, as soon as the job follows a plan: it proves its saving at full speed at times."""
    shown: dict[str, Any] = {}

    def has_shown() -> bool:
        capsys.readouterr()
        status = run([*arguments, "--json", "--socket", str(daemon.socket_path)])
        output = capsys.readouterr()
        if status == 2 and "follows no plan" in output.err:
            return False
        assert status == 0, output.err
        shown.update(json.loads(output.out.splitlines()[-1]))
        return True

    wait_until(has_shown)
    return shown


def test_the_plan_of_a_running_job_agrees_with_the_one_in_force(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    # The job may be profiled again, or proves its saving at full speed: then no plan with clocks is in force.
    planned: dict[str, Any] = {}

    def is_tuned() -> bool:
        planned.update(figures(daemon, capsys, "plan", "--job", "fake"))
        return planned["job"]["in_force"] is not None and planned["job"]["phase"] == "tuned"

    wait_until(is_tuned)
    in_force = planned["job"]["in_force"]

    assert planned["iteration_time_s"] <= planned["job"]["target_time_s"] - planned["job"]["bias_s"] + 1e-9
    assert planned["energy_j"] >= planned["lower_bound_j"] * (1 - 1e-9)
    assert planned["energy_j"] <= in_force["energy_j"] * 1.005
    assert in_force["energy_j"] == pytest.approx(in_force["predicted_energy_j"], rel=0.1)
    assert in_force["energy_j"] < planned["baseline_energy_j"]


def test_each_instruction_of_the_plan_in_force_is_explained(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = figures(daemon, capsys, "explain", "--job", "fake")
    (one,) = figures(daemon, capsys, "explain", "--job", "fake", "F0@1")["instructions"]

    assert len(explained["instructions"]) == 4 * 2 * 8
    assert explained["job"]["in_force"]["iteration_time_s"] == pytest.approx(explained["iteration_time_s"])
    assert (one["stage"], one["instruction"], one["microbatch"]) == (1, "F", 0)
    assert one["explanation"]


def test_the_exported_profile_gives_the_same_plan(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, table = tmp_path / "profile.json", tmp_path / "profile.csv"
    of_job = figures(daemon, capsys, "plan", "--job", "fake", "--export", str(exact))
    assert run(["plan", "--job", "fake", "--export", str(exact), "--socket", str(daemon.socket_path)]) == 2
    of_table = figures(daemon, capsys, "plan", "--job", "fake", "--export", str(table))

    capsys.readouterr()
    assert run([*of_job["plan_command"].split()[1:], "--json"]) == 0
    from_exact = json.loads(capsys.readouterr().out)
    assert run([*of_table["plan_command"].split()[1:], "--json"]) == 0
    from_table = json.loads(capsys.readouterr().out)

    assert from_exact["energy_j"] == pytest.approx(of_job["energy_j"], rel=1e-4)
    assert from_exact["baseline_energy_j"] == pytest.approx(of_job["baseline_energy_j"], rel=1e-6)
    assert from_table["baseline_energy_j"] == pytest.approx(of_table["baseline_energy_j"], rel=0.03)
    assert from_table["energy_j"] == pytest.approx(of_table["energy_j"], rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan",), "give FILE, a profile CSV or an instance JSON, or --job JOB"),
        (("plan", "x.csv", "--job", "fake"), "and not both"),
        (("plan", "x.csv", "--export", "y.csv"), "--export: only together with --job"),
        (("plan", "--job", "nobody"), "no job 'nobody' runs here; running: "),
        (("plan", "--job", "fake", "--microbatches", "9"), "--microbatches 9: job fake-"),
        (("explain", "--job", "fake", "F99@9"), "F99@9"),
    ],
)
def test_a_mistake_is_one_line(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    errors: list[str] = []

    def is_refused() -> bool:
        capsys.readouterr()
        exit_code = run([*arguments, "--socket", str(daemon.socket_path)])
        errors.append(capsys.readouterr().err)
        if exit_code == DaemonNotRunningError.exit_code:  # on a busy host
            return False
        assert exit_code == 2
        return "follows no plan" not in errors[-1]

    wait_until(is_refused)
    error = errors[-1]
    assert text in error
    assert error.count("\n") == 1


def test_a_job_without_baseline_has_no_profile_yet(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with running_daemon(tmp_path) as other:
        client = other.client()
        gpu_uuid = other.status()["gpus"][0]["gpu_uuid"]
        client.post("/v1/ranks", one_stage_registration(gpu_uuid, "idle"))
        assert run(["plan", "--job", "idle", "--socket", str(other.socket_path)]) == 1
        client.close()

    assert "has no baseline yet" in capsys.readouterr().err
    assert daemon.status()["jobs"]
