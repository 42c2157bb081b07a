"""`gpuenergyd demo`: trains a real pipeline on simulated GPUs under a private daemon, then cleans up."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuenergyd.cli.demo.grid import DemoGrid
from gpuenergyd.cli.demo.request import DemoRequest, check_request
from gpuenergyd.cli.demo.slow_start import end_start
from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown, warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import DaemonNotRunningError, GpuEnergyError, UsageError

if TYPE_CHECKING:
    from gpuenergyd.cli.demo.processes import Child, Children
    from gpuenergyd.cli.demo.progress import Progress
    from gpuenergyd.client.connection import DaemonClient

_STATUS_PERIOD_S = 0.5
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_JOB_NAME = "demo-gpt"
_STEP_PREFIX = "gpt: "
"""Beginning of the lines in which the training program says what it does until it registers."""
_MAX_FOLDER_CHARS = 60
"""A Unix socket's path is limited to 107 characters, including the names below this folder."""
_FAKE_NVML_VARIABLE = "GPUENERGYD_FAKE_NVML_WORLD"
"""Variable with the folder of simulated GPUs behind a fake NVML library, such as the one of the tests."""


def demo(  # noqa: PLR0913  each option is a parameter
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML report to write.")] = Path(
        "gpuenergyd-demo-report.html"
    ),
    gpus: Annotated[int, typer.Option(min=2, max=8, metavar="N", help="Simulated GPUs, one pipeline stage each.")] = 4,
    gpu_model: Annotated[str, typer.Option(metavar="MODEL", help="GPU model, e.g. a100-sxm or a40.")] = "a100-sxm",
    microbatches: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Microbatches per iteration.")] = 8,
    baseline_iterations: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Iterations at full speed.")
    ] = 10,
    tuned_iterations: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Iterations under the plan.")
    ] = 12,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Clock policy, see `gpuenergyd policies`.")
    ] = "bubble-aware",
    max_slowdown: Annotated[
        float, typer.Option(callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed.")] = 0,
    driver: Annotated[
        str, typer.Option(metavar="simulated|nvml", help="nvml needs an NVML library that shows simulated GPUs.")
    ] = "simulated",
    simulation: Annotated[
        str,
        typer.Option(
            metavar="unkind|kind",
            help="Simulated GPUs with late clocks, slow reads and stalls as on real hosts, or ideal ones.",
        ),
    ] = "unkind",
    carbon_trace: Annotated[
        str | None,
        typer.Option(metavar="FILE|synthetic", help="Follow the grid of an hourly carbon trace."),
    ] = None,
    carbon_hour_s: Annotated[
        float, typer.Option(min=1.0, max=3600.0, metavar="S", help="Real seconds per hour of the trace.")
    ] = 30.0,
    carbon_hours: Annotated[
        int, typer.Option(min=6, max=1000, metavar="H", help="Length of the job in hours of the trace.")
    ] = 12,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep history, logs and simulated GPUs here.")
    ] = None,
    time_limit_s: Annotated[float, typer.Option(min=1.0, metavar="S", help="Fail after this many seconds.")] = 600.0,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep the daemon after the training until Enter, to look at the job.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Train on simulated GPUs and report the saving.

    Runs a small GPT in a real torch pipeline under a private daemon: baseline, profiling, tuned iterations, report. The
    last line is the result in one sentence.

    Examples:
        gpuenergyd demo
        gpuenergyd demo --gpus 8 --microbatches 16 --max-slowdown 0.05
        gpuenergyd demo --carbon-trace synthetic
    """
    request = DemoRequest(
        driver=driver,
        num_gpus=gpus,
        gpu_model=gpu_model,
        num_microbatches=microbatches,
        baseline_iterations=baseline_iterations,
        tuned_iterations=tuned_iterations,
        policy=policy,
        max_slowdown_ratio=max_slowdown,
        seed=seed,
        time_limit_s=time_limit_s,
        simulation=simulation,
        grid=DemoGrid(carbon_trace, carbon_hour_s, carbon_hours) if carbon_trace is not None else None,
        is_held=hold,
    )
    check_request(request, out)
    end_start()
    warn_of_large_slowdown(max_slowdown)
    with _folder(keep) as (folder, inherited_fds), _progress(request, as_json=as_json) as progress:
        progress.announce(f"gpuenergyd demo on {request.gpus}: starting a private daemon")
        database_url = _run(request, folder, inherited_fds, progress)
        progress.announce("writing the report")
        from gpuenergyd.cli.demo.result import json_figures, print_result, result_sentence, write_report  # noqa: PLC0415

        result = write_report(database_url, out, job_name=_JOB_NAME)
    sentence = result_sentence(result.report.summary, gpus=request.gpus)
    if as_json:
        typer.echo(sentence, err=True)
        print_json(json_figures(result.report, out, request))
    else:
        print_result(result, out)
        typer.echo(sentence)
    return 0


def _run(request: DemoRequest, folder: Path, inherited_fds: Sequence[int], progress: "Progress") -> str:
    """Train until enough planned iterations have run, stop all processes, and return the URL of the history."""
    from gpuenergyd.cli.demo.processes import Children, raise_on_termination  # noqa: PLC0415  start fast
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415
    from gpuenergyd.client.environment import HOURS_VARIABLE  # noqa: PLC0415
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415

    # Isolate the demo from an installed daemon and its settings.
    kept = {"GPUENERGYD_DEBUG", _FAKE_NVML_VARIABLE}
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_") and name not in kept]:
        del os.environ[name]
    config, world = folder / "config.toml", _world(request, folder)
    config.touch()
    if request.grid is not None:
        budget = request.max_slowdown_ratio
        config.write_text(request.grid.configuration(folder, seed=request.seed, budget_ratio=budget), encoding="utf-8")
    (folder / "tmp").mkdir()
    settings = load_settings(
        config, driver=request.driver, world_path=world, runtime_dir=folder / "run", state_dir=folder / "state"
    )
    raise_on_termination()
    client = DaemonClient(str(settings.socket_path))
    with Children(folder, inherited_fds) as children:
        children.start(
            "daemon",
            [
                "gpuenergyd.cli.main", "serve",
                "--config", str(config),
                "--driver", request.driver,
                "--world", str(world),
                "--runtime-dir", str(settings.runtime_dir),
                "--state-dir", str(settings.state_dir),
                "--policy", request.policy,
                "--max-slowdown", str(request.max_slowdown_ratio),
                "--baseline-iterations", str(request.baseline_iterations),
            ],
        )  # fmt: skip
        _wait_for_daemon(client, children)
        progress.announce("training a small GPT: real torch pipeline and gradients, simulated GPUs; importing torch")
        training = children.start(
            "training",
            [
                "gpuenergyd_trainers.demo.gpt",
                "--world", str(world),
                "--stages", str(request.num_gpus),
                "--microbatches", str(request.num_microbatches),
                "--seed", str(request.seed),
                "--job", _JOB_NAME,
                *request.run_ahead_options,
            ],
            GPUENERGYD_SOCKET=str(settings.socket_path),
            TMPDIR=str(folder / "tmp"),  # torch leaves temporary folders behind
            **({HOURS_VARIABLE: str(request.grid.job_hours)} if request.grid is not None else {}),
        )  # fmt: skip
        _watch(request, client, children, training, progress)
        progress.announce("stopping the training")
        children.stop(training)
        _wait_for_end(client)
        if request.is_held:
            progress.announce(f"the daemon answers at {settings.socket_path} (GPUENERGYD_SOCKET) until you press Enter")
            sys.stdin.readline()
        progress.announce("stopping the daemon")
    client.close()
    _check_clocks_are_restored(world)
    return settings.database_url


def _world(request: DemoRequest, folder: Path) -> Path:
    """Return the folder of the simulated GPUs: a new one, or that of the fake NVML library.

    Raises:
        GpuEnergyError: NVML lists real GPUs, or too few simulated ones.
    """
    from gpuenergyd.gpu.drivers.opening import open_driver  # noqa: PLC0415  start fast
    from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415
    from gpuenergyd.gpu.drivers.world_kinds import world_kind  # noqa: PLC0415

    if request.driver == "simulated":
        world = folder / "world"
        models = [request.gpu_model] * request.num_gpus
        SimulatedHost.create(world, models, seed=request.seed, kind=world_kind(request.simulation)).close()
        return world
    nvml = open_driver(request.driver, None)
    shown = [identity.gpu_uuid for identity in nvml.identities()]
    nvml.close()
    simulated: list[str] = []
    if behind := os.environ.get(_FAKE_NVML_VARIABLE):
        host = SimulatedHost.open(Path(behind))
        simulated = [identity.gpu_uuid for identity in host.identities()]
        host.close()
    if behind is None or shown != simulated:
        raise GpuEnergyError(
            "the demo runs on simulated GPUs only, but NVML lists real GPUs on this host; use --driver simulated"
        )
    if len(shown) < request.num_gpus:
        raise GpuEnergyError(f"--gpus {request.num_gpus}: NVML lists only {count_text(len(shown), 'simulated GPU')}")
    return Path(behind)


def _wait_for_daemon(client: "DaemonClient", children: "Children") -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while True:
        children.check()
        try:
            client.get_status()
        except DaemonNotRunningError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _wait_for_end(client: "DaemonClient") -> None:
    """Wait until the daemon has recorded the end of the job; it finishes the job itself if that takes too long."""
    until = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < until and not client.get_status()["ended_jobs"]:
        time.sleep(0.05)


def _check_running(children: "Children", training: "Child") -> None:
    children.check()
    if training.process.poll() is not None:
        raise GpuEnergyError("the training exited before enough planned iterations had run")


def _watch(
    request: DemoRequest, client: "DaemonClient", children: "Children", training: "Child", progress: "Progress"
) -> None:
    """Show the daemon's status until enough planned iterations have run."""
    extra_time_s = request.grid.extra_time().total_seconds() if request.grid is not None else 0.0
    until = time.monotonic() + request.time_limit_s + extra_time_s
    while True:
        _check_running(children, training)
        status = client.get_status()
        job = status["jobs"][0] if status["jobs"] else None
        if job is not None:
            is_finished = request.is_finished(job)
            if not is_finished:
                _check_job(job, request)
            progress.show(status)
            if is_finished:
                return
        elif step := training.last_line(_STEP_PREFIX):
            progress.announce(step)
        if time.monotonic() > until:
            phase = f"phase {job['phase']}: {job['plan_reason']}" if job else "no job has registered"
            raise GpuEnergyError(f"not enough planned iterations within {request.time_limit_s:g} s; {phase}")
        time.sleep(_STATUS_PERIOD_S)


def _check_job(job: Mapping[str, Any], request: DemoRequest) -> None:
    """Check that the job can still reach a plan.

    Raises:
        GpuEnergyError: its policy has failed, or makes no plan, or the job stays at full speed.
    """
    if (failure := _policy_failure(job)) is not None:
        raise GpuEnergyError(f"policy {request.policy!r} failed: {failure}")
    if job["is_given_up"]:
        raise GpuEnergyError(f"the job stays at full speed: {job['phase_reason']}")
    if request.has_no_plan(job):
        reason = job["phase_reason"] if job["phase"] == "fallback" else job["plan_reason"]
        raise GpuEnergyError(f"policy {request.policy!r} made no plan: {reason}")


def _policy_failure(job: Mapping[str, Any]) -> str | None:
    """Return why the policy failed; a policy that was only too slow is asked again."""
    prefix = f"policy {job['policy']} failed: "
    reason = str(job["phase_reason"])
    if job["phase"] != "fallback" or not reason.startswith(prefix) or "did not answer within" in reason:
        return None
    return reason.removeprefix(prefix)


def _check_clocks_are_restored(world: Path) -> None:
    """Check that no simulated GPU has a clock lock.

    Raises:
        GpuEnergyError: the daemon has left a clock lock behind.
    """
    from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415  start fast

    host = SimulatedHost.open(world)
    try:
        locked = [gpu.index for gpu in host.identities() if host.locked_sm_clock_mhz(gpu.gpu_uuid) is not None]
    finally:
        host.close()
    if locked:
        raise GpuEnergyError(f"the daemon has left a clock lock on simulated GPU {', '.join(map(str, locked))}")


def _progress(request: DemoRequest, *, as_json: bool) -> "Progress":
    """Return a live view on a terminal, plain lines elsewhere; with --json on stderr."""
    from rich.console import Console  # noqa: PLC0415  start fast

    from gpuenergyd.cli.demo.progress import LineProgress, LiveProgress  # noqa: PLC0415

    console = Console(stderr=as_json, highlight=False)
    baseline, tuned = request.baseline_iterations, request.tuned_iterations
    if console.is_terminal:
        return LiveProgress(console, baseline_iterations=baseline, tuned_iterations=tuned)
    return LineProgress(
        lambda text: typer.echo(text, err=as_json), baseline_iterations=baseline, tuned_iterations=tuned
    )


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the demo's private folder and the file descriptors that child processes must inherit.

    The folder's path is short enough for sockets. It is removed at the end, even if the demo is killed, unless `keep`
    names it.
    """
    from gpuenergyd.cli.demo.processes import remove_on_exit  # noqa: PLC0415  start fast

    if keep is not None:
        try:
            keep.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise UsageError(f"--keep {keep}: {error.strerror}; must be a folder that does not exist yet") from None
        yield keep.resolve(), ()
        return
    is_short = len(tempfile.gettempdir()) <= _MAX_FOLDER_CHARS
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-demo-", dir=None if is_short else "/tmp"))  # noqa: S108  unguessable
    with remove_on_exit(folder) as inherited_fd:
        yield folder, (inherited_fd,)
