"""`gpuenergyd demo`: the whole loop on simulated GPUs with a real pipeline; private, and gone without a trace."""

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuenergyd.cli.demo.grid import DemoGrid
from gpuenergyd.cli.output import JsonOption, print_json
from gpuenergyd.errors import DaemonNotRunningError, GpuEnergyError, UsageError

if TYPE_CHECKING:
    from gpuenergyd.cli.demo.processes import Child, Children
    from gpuenergyd.cli.demo.progress import Progress
    from gpuenergyd.client.connection import DaemonClient

_STATUS_PERIOD_S = 0.5
_START_LIMIT_S = 60.0
_JOB_NAME = "demo-gpt"
_PATIENCE_ITERATIONS = 8
"""Iterations that pass between the end of the baseline and the first plan in force, generously."""
_PATIENCE_RATIO = 5
"""Corrections may take so many times the planned iterations that were asked for; the last plan is then judged early."""
_MAX_FOLDER_CHARS = 60
"""A Unix socket's path may have 107 characters, the names below this folder included."""
_WORLD_BEHIND_NVML = "GPUENERGYD_FAKE_NVML_WORLD"
"""Where an NVML library that shows simulated GPUs, as this project's tests have one, finds them."""


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What to demonstrate."""

    driver: str
    num_gpus: int
    gpu_model: str
    num_microbatches: int
    baseline_iterations: int
    tuned_iterations: int
    policy: str
    max_slowdown_ratio: float
    seed: int
    time_limit_s: float
    grid: DemoGrid | None = None
    """Follow this grid until the job is as long as it said it would be."""


def demo(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML page to write.")] = Path(
        "gpuenergyd-demo-report.html"
    ),
    gpus: Annotated[int, typer.Option(min=2, max=8, help="Simulated GPUs, one pipeline stage each.")] = 4,
    gpu_model: Annotated[str, typer.Option(metavar="MODEL", help="a100-sxm, a40, ...")] = "a100-sxm",
    microbatches: Annotated[int, typer.Option(min=1, max=64, help="Microbatches per iteration.")] = 8,
    baseline_iterations: Annotated[int, typer.Option(min=1, max=1000, help="Un-tuned iterations.")] = 10,
    tuned_iterations: Annotated[int, typer.Option(min=1, max=1000, help="Planned iterations.")] = 12,
    policy: Annotated[str, typer.Option(metavar="NAME", help="As `gpuenergyd policies` lists.")] = "bubble-aware",
    max_slowdown: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="RATIO", help="0.05 is 5 %.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulated GPUs' noise and the training.")] = 0,
    driver: Annotated[
        str, typer.Option(help="simulated; or nvml, where the NVML library shows simulated GPUs, as in the tests.")
    ] = "simulated",
    carbon_trace: Annotated[
        str | None,
        typer.Option(metavar="FILE|synthetic", help="Follow an hourly trace, lived again at speed, or a made-up one."),
    ] = None,
    carbon_hour_s: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="An hour of the trace takes so long.")
    ] = 30.0,
    carbon_hours: Annotated[
        int, typer.Option(min=6, max=1000, help="Length of the job, over which its budget is kept.")
    ] = 12,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Leave history, logs and simulated GPUs here.")
    ] = None,
    time_limit_s: Annotated[float, typer.Option(min=1.0, help="Give up after this many seconds.")] = 600.0,
    as_json: JsonOption = False,
) -> int:
    """Show the whole loop on simulated GPUs.

    Trains a small GPT on a real pipeline under a private daemon: baseline, profiling, planned iterations, a report.
    """
    from gpuenergyd.daemon.processes.plugins import check_policy_name  # noqa: PLC0415  start fast
    from gpuenergyd.gpu.drivers.opening import DRIVERS  # noqa: PLC0415  start fast

    check_policy_name(policy)
    for module in ("torch", "gpuenergyd_trainers"):
        if importlib.util.find_spec(module) is None:
            raise GpuEnergyError(f"the demo trains with {module}: pip install 'gpuenergyd[daemon,trainers]'")
    if microbatches < gpus:
        raise UsageError(f"--microbatches {microbatches}: torch's 1F1B needs at least one for each of {gpus} GPUs")
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: no folder {out.parent}")
    if driver not in DRIVERS:
        raise UsageError(f"--driver {driver!r}: there are: {', '.join(DRIVERS)}")
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
        grid=DemoGrid(carbon_trace, carbon_hour_s, carbon_hours) if carbon_trace is not None else None,
    )
    with _folder(keep) as (folder, held_fds):
        database_url = _run(request, folder, held_fds, as_json=as_json)
        figures = _report(request, database_url, out, as_json=as_json)
    if as_json:
        print_json(figures)
    return 0


def _run(request: DemoRequest, folder: Path, held_fds: Sequence[int], *, as_json: bool) -> str:
    """Train until enough planned iterations have run; return where the history is. Nothing is left running."""
    from gpuenergyd.cli.demo.processes import Children, raise_on_termination  # noqa: PLC0415  start fast
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415
    from gpuenergyd.client.length import HOURS_VARIABLE  # noqa: PLC0415
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415

    # A daemon that already runs here, and what is set for it, shall not meet this one.
    kept = {"GPUENERGYD_DEBUG", _WORLD_BEHIND_NVML}
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
    with _progress(request, as_json=as_json) as progress:
        with Children(folder, held_fds) as children:
            shown = request.gpu_model if request.driver == "simulated" else "through NVML"
            progress.say(f"starting a private daemon on {request.num_gpus} simulated GPUs ({shown})")
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
            progress.say("training a small GPT: real torch, real pipeline, real gradients; the GPUs are simulated")
            training = children.start(
                "training",
                [
                    "gpuenergyd_trainers.demo.gpt",
                    "--world", str(world),
                    "--stages", str(request.num_gpus),
                    "--microbatches", str(request.num_microbatches),
                    "--seed", str(request.seed),
                    "--job", _JOB_NAME,
                ],
                GPUENERGYD_SOCKET=str(settings.socket_path),
                TMPDIR=str(folder / "tmp"),  # torch leaves folders there
                **({HOURS_VARIABLE: str(request.grid.job_hours)} if request.grid is not None else {}),
            )  # fmt: skip
            _watch(request, client, lambda: _check_running(children, training), progress)
            progress.say("stopping the training, then the daemon")
        client.close()
    _check_clocks_are_back(world)
    return settings.database_url


def _world(request: DemoRequest, folder: Path) -> Path:
    """Return where the simulated GPUs live: a new world, or the one that the NVML library shows.

    Raises:
        GpuEnergyError: NVML shows GPUs that are not simulated, or too few of them.
    """
    from gpuenergyd.gpu.drivers.opening import open_driver  # noqa: PLC0415  start fast
    from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415

    if request.driver == "simulated":
        world = folder / "world"
        SimulatedHost.create(world, [request.gpu_model] * request.num_gpus, seed=request.seed).close()
        return world
    nvml = open_driver(request.driver, None)
    shown = [identity.gpu_uuid for identity in nvml.identities()]
    nvml.close()
    simulated: list[str] = []
    if behind := os.environ.get(_WORLD_BEHIND_NVML):
        host = SimulatedHost.open(Path(behind))
        simulated = [identity.gpu_uuid for identity in host.identities()]
        host.close()
    if behind is None or shown != simulated:
        raise GpuEnergyError(
            "the demo trains simulated stages, which cannot run on the real GPUs that NVML shows here;"
            " use --driver simulated"
        )
    if len(shown) < request.num_gpus:
        raise GpuEnergyError(f"--gpus {request.num_gpus}: NVML shows {len(shown)} simulated GPUs here")
    return Path(behind)


def _wait_for_daemon(client: "DaemonClient", children: "Children") -> None:
    until = time.monotonic() + _START_LIMIT_S
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


def _check_running(children: "Children", training: "Child") -> None:
    children.check()
    if training.process.poll() is not None:
        raise GpuEnergyError("the training ended before enough planned iterations had run")


def _watch(
    request: DemoRequest, client: "DaemonClient", check_running: Callable[[], None], progress: "Progress"
) -> None:
    """Show the daemon's state until enough planned iterations have run."""
    patience_s = request.grid.patience().total_seconds() if request.grid is not None else 0.0
    until = time.monotonic() + request.time_limit_s + patience_s
    while True:
        check_running()
        status = client.get_status()
        progress.show(status)
        job = status["jobs"][0] if status["jobs"] else None
        if job and _has_shown_enough(job, request):
            return
        if job and job["is_given_up"]:
            raise GpuEnergyError(f"the job stays at full speed: {job['phase_reason']}")
        if job and _has_planned_nothing(job, request):
            raise GpuEnergyError(f"policy {request.policy!r} has planned nothing to show: {job['plan_reason']}")
        if time.monotonic() > until:
            phase = f"phase {job['phase']}: {job['plan_reason']}" if job else "no job has registered"
            raise GpuEnergyError(f"not enough planned iterations within {request.time_limit_s:g} s; {phase}")
        time.sleep(_STATUS_PERIOD_S)


def _has_shown_enough(job: Mapping[str, Any], request: DemoRequest) -> bool:
    """Return whether the plan in force has run long enough to be judged, or corrections went on for very long."""
    if request.grid is not None:
        return request.grid.is_over(job)
    is_tuned = job["plan_purpose"] == "tuned"
    settled = is_tuned and job["num_iterations_of_plan"] > request.tuned_iterations
    return bool(settled) or (job["num_tuned_iterations"] or 0) >= _PATIENCE_RATIO * request.tuned_iterations


def _has_planned_nothing(job: Mapping[str, Any], request: DemoRequest) -> bool:
    """Return whether a policy has had the time for what was wanted and still runs the job un-tuned."""
    enough = request.baseline_iterations + request.tuned_iterations + _PATIENCE_ITERATIONS
    return not job["num_tuned_iterations"] and (job["num_baseline_iterations"] or 0) >= enough


def _check_clocks_are_back(world: Path) -> None:
    """Check that the daemon has left every simulated GPU as it found it."""
    from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415  start fast

    host = SimulatedHost.open(world)
    try:
        slow = [gpu.index for gpu in host.identities() if host.locked_sm_clock_mhz(gpu.gpu_uuid) is not None]
    finally:
        host.close()
    if slow:
        raise GpuEnergyError(f"the daemon has left a clock lock on simulated GPU {', '.join(map(str, slow))}")


def _report(request: DemoRequest, database_url: str, out: Path, *, as_json: bool) -> dict[str, Any]:
    """Print the table, write the page, and return the figures of the plan in force."""
    from gpuenergyd.cli.commands.report_output import write_text  # noqa: PLC0415
    from gpuenergyd.cli.terminal import people_console  # noqa: PLC0415  start fast
    from gpuenergyd.report.job import job_reports  # noqa: PLC0415
    from gpuenergyd.report.page import report_page  # noqa: PLC0415
    from gpuenergyd.report.terminal.tables import job_table  # noqa: PLC0415
    from gpuenergyd.store import open_history  # noqa: PLC0415

    with open_history(database_url) as history:
        reports = job_reports(history, job=_JOB_NAME)
        if not reports:
            raise GpuEnergyError("the history holds no job: the training never registered")
        note = "This was the demo: a small GPT on simulated GPUs under a private daemon."
        write_text(out, report_page(history, reports, made_at=datetime.now().astimezone(), note=note))
    job = reports[-1].summary
    plan = reports[-1].plan_in_force
    if plan is None:
        raise GpuEnergyError("the history holds no planned iteration")
    if not as_json:
        console = people_console()
        console.print(job_table(reports[-1]))
        console.print(f"timelines before and after: {out}", soft_wrap=True)
    return {
        "baseline_iteration_time_s": job.baseline_time_s,
        "iteration_time_s": plan.iteration_time_s,
        "baseline_energy_j": job.baseline_energy_j,
        "energy_j": plan.energy_j,
        "saving_ratio": plan.saving_ratio,
        "slowdown_ratio": plan.slowdown_ratio,
        "policy": job.policy,
        "gpus": request.num_gpus,
        **(reports[-1].carbon.figures() if reports[-1].carbon is not None else {}),
        "simulated": True,  # `_world` accepts no other GPUs, whatever the driver says they are
        "report_path": str(out),
    }


def _progress(request: DemoRequest, *, as_json: bool) -> "Progress":
    """Return the live view on a terminal, plain lines elsewhere; beside JSON all of it goes to stderr."""
    from rich.console import Console  # noqa: PLC0415  start fast

    from gpuenergyd.cli.demo.progress import LineProgress, LiveProgress  # noqa: PLC0415

    console = Console(stderr=as_json, highlight=False)
    wanted = {"baseline_iterations": request.baseline_iterations, "tuned_iterations": request.tuned_iterations}
    if console.is_terminal:
        return LiveProgress(console, **wanted)
    return LineProgress(lambda text: typer.echo(text, err=as_json), **wanted)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the demo's private folder, and the descriptors that children shall hold as long as they use it.

    It is short enough for socket paths, and removed at the end, however that comes, unless it is to be kept.
    """
    from gpuenergyd.cli.demo.processes import removed_when_left  # noqa: PLC0415  start fast

    if keep is not None:
        try:
            keep.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise UsageError(f"--keep {keep}: {error.strerror}; name a folder that does not exist yet") from None
        yield keep.resolve(), ()
        return
    is_short = len(tempfile.gettempdir()) <= _MAX_FOLDER_CHARS
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-demo-", dir=None if is_short else "/tmp"))  # noqa: S108  unguessable
    with removed_when_left(folder) as held_fd:
        yield folder, (held_fd,)
