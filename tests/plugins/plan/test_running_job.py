"""`plan --job` and `explain --job` on a running job: they agree with the plan in force and an exported profile."""

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.jobs.operators import JobFits
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.daemon_process import running_daemon, training
from tests.support.http_handler import QuietHandler
from tests.support.registration import one_stage_registration
from tests.support.thorough import thorough
from tests.support.waiting import wait_until

STAGES = (1.0, 0.93, 1.0, 1.10)


class _Replies(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    bodies: dict[str, bytes]


class _RequestHandler(QuietHandler):
    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls it by
        assert isinstance(self.server, _Replies)
        self.send_json(self.server.bodies[self.path])


@contextmanager
def virtual_job(folder: Path) -> Iterator[str]:
    """Serve a job that was tuned in virtual time, as a daemon does, and return the socket."""
    policy = BubbleAware()
    tuned = VirtualTraining(one_forward_one_backward(len(STAGES), 8), a100_stages(STAGES), policy)
    job = tuned.job
    job.description = replace(job.description, job_id="fake-1", job_name="fake", policy="bubble-aware")
    while job.phase is not JobPhase.TUNED or not job.current_plan.ranks:
        assert len(tuned.history) < 60
        tuned.run(1)

    async def fitted(_job_id: str, _policy: str, view: JobView) -> FittedPipeline:
        found = policy.fitted(view)
        assert found is not None
        return found

    runner = SimpleNamespace(job=job, is_member=False)
    jobs = cast("Jobs", SimpleNamespace(runner=lambda _: runner, leader=lambda _: None))
    status = {"jobs": [{"job_id": "fake-1", "job_name": "fake", "pipeline": None, "is_pipeline_member": False}]}
    with _Replies(str(folder / "daemon.sock"), _RequestHandler) as server:
        server.bodies = {
            "/v1/status": json.dumps(status).encode(),
            "/v1/jobs/fake-1/fit": encode(asyncio.run(JobFits(jobs, fitted).fit("fake-1"))),
        }
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield str(folder / "daemon.sock")
        finally:
            server.shutdown()
            serving.join()


@contextmanager
def real_job(folder: Path) -> Iterator[str]:
    """Run a daemon with a tuned job of four stages."""
    with (
        running_daemon(folder, kind=WorldKind.KIND) as made,
        training(made, arguments=("--microbatches", "8")) as run_of_job,
    ):
        made.wait_for_phase("tuned")
        yield str(made.socket_path)
        run_of_job.finish()


# On a busy host, profiling in real time takes minutes or does not end.
@pytest.fixture(scope="module", params=[virtual_job, *thorough(real_job)])
def socket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a daemon with a tuned job of four stages."""
    with request.param(tmp_path_factory.mktemp("running-job")) as path:
        yield path


def figures(socket: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what a command shows, as soon as the job follows a plan: it proves its saving at full speed at times."""
    shown: dict[str, Any] = {}

    def has_shown() -> bool:
        capsys.readouterr()
        status = run([*arguments, "--json", "--socket", socket])
        output = capsys.readouterr()
        if status == 2 and "follows no plan" in output.err:
            return False
        assert status == 0, output.err
        shown.update(json.loads(output.out.splitlines()[-1]))
        return True

    wait_until(has_shown)
    return shown


def test_the_plan_of_a_running_job_agrees_with_the_one_in_force(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The job may be profiled again, or proves its saving at full speed: then no plan with clocks is in force.
    planned: dict[str, Any] = {}

    def is_tuned() -> bool:
        planned.update(figures(socket, capsys, "plan", "--job", "fake"))
        return planned["job"]["in_force"] is not None and planned["job"]["phase"] == "tuned"

    wait_until(is_tuned)
    in_force = planned["job"]["in_force"]

    assert planned["iteration_time_s"] <= planned["job"]["target_time_s"] - planned["job"]["bias_s"] + 1e-9
    assert planned["energy_j"] >= planned["lower_bound_j"] * (1 - 1e-9)
    assert planned["energy_j"] <= in_force["energy_j"] * 1.005
    assert in_force["energy_j"] == pytest.approx(in_force["predicted_energy_j"], rel=0.1)
    assert in_force["energy_j"] < planned["baseline_energy_j"]


def test_each_instruction_of_the_plan_in_force_is_explained(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    explained = figures(socket, capsys, "explain", "--job", "fake")
    (one,) = figures(socket, capsys, "explain", "--job", "fake", "F0@1")["instructions"]

    assert len(explained["instructions"]) == 4 * 2 * 8
    assert explained["job"]["in_force"]["iteration_time_s"] == pytest.approx(explained["iteration_time_s"])
    assert (one["stage"], one["instruction"], one["microbatch"]) == (1, "F", 0)
    assert one["explanation"]


def test_the_exported_profile_gives_the_same_plan(
    socket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, table = tmp_path / "profile.json", tmp_path / "profile.csv"
    of_job = figures(socket, capsys, "plan", "--job", "fake", "--export", str(exact))
    assert run(["plan", "--job", "fake", "--export", str(exact), "--socket", socket]) == 2
    of_table = figures(socket, capsys, "plan", "--job", "fake", "--export", str(table))

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
    socket: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    errors: list[str] = []

    def is_refused() -> bool:
        capsys.readouterr()
        exit_code = run([*arguments, "--socket", socket])
        errors.append(capsys.readouterr().err)
        if exit_code == DaemonNotRunningError.exit_code:  # on a busy host
            return False
        assert exit_code == 2
        return "follows no plan" not in errors[-1]

    wait_until(is_refused)
    error = errors[-1]
    assert text in error
    assert error.count("\n") == 1


def test_a_job_without_baseline_has_no_profile_yet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running_daemon(tmp_path) as other:
        client = other.client()
        gpu_uuid = other.status()["gpus"][0]["gpu_uuid"]
        client.post("/v1/ranks", one_stage_registration(gpu_uuid, "idle"))
        assert run(["plan", "--job", "idle", "--socket", str(other.socket_path)]) == 1
        client.close()

    assert "has no baseline yet" in capsys.readouterr().err
