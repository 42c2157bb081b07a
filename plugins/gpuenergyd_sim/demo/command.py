"""`gpuenergyd demo`: trains a real pipeline on simulated GPUs under a private daemon, then cleans up."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown, warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd_sim.demo.grid import DemoGrid
from gpuenergyd_sim.demo.request import DEFAULT_POLICY, DemoRequest, check_request
from gpuenergyd_sim.demo.session import JOB_NAME, check_clocks_are_restored, run_session
from gpuenergyd_sim.driver.world_kinds import WorldKind

if TYPE_CHECKING:
    from gpuenergyd_sim.demo.progress import ShownProgress

ShowResult: TypeAlias = Callable[[str, "ShownProgress"], None]
_LOOK_PERIOD_S = 0.2
_BUSY_LOAD_PER_CPU = 0.75
_MAX_FOLDER_CHARS = 60
"""Longest path of the demo's folder, since a Unix socket's path inside it is limited to 107 characters."""


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
    ] = 40,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Clock policy, see `gpuenergyd policies`.")
    ] = DEFAULT_POLICY,
    max_slowdown: Annotated[
        float, typer.Option(callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed.")] = 0,
    driver: Annotated[
        str, typer.Option(metavar="simulated|nvml", help="nvml needs an NVML library that shows simulated GPUs.")
    ] = "simulated",
    simulation: Annotated[
        WorldKind,
        typer.Option(
            metavar="unkind|kind", help="Simulate late clocks, slow reads and stalls as on real hosts, or ideal GPUs."
        ),
    ] = WorldKind.UNKIND,
    carbon_trace: Annotated[
        str | None, typer.Option(metavar="FILE|synthetic", help="Follow the grid of an hourly carbon trace.")
    ] = None,
    carbon_hour_s: Annotated[
        float, typer.Option(min=1.0, max=3600.0, metavar="S", help="Seconds of training per hour of the trace.")
    ] = 30.0,
    carbon_hours: Annotated[
        int, typer.Option(min=6, max=1000, metavar="H", help="Length of the job in hours of the trace.")
    ] = 12,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep history, logs and simulated GPUs here.")
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="End the training after this many seconds.")
    ] = 600.0,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep the daemon after the result until Enter, to look at the job.")
    ] = False,
    real_time: Annotated[
        bool,
        typer.Option("--real-time", help="Run separate processes to watch, kill and attach to; needs a quiet host."),
    ] = False,
    kill_worker_after_s: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="S", help="Kill the GPU worker once S simulated seconds of the job have passed."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Train on simulated GPUs and report the saving.

    Runs a small GPT in a real torch pipeline under a private daemon: baseline, plans that learn, report. The last line
    is the result in one sentence. Time is simulated, too, so that the load of this host does not change the result.

    Examples:
        gpuenergyd demo
        gpuenergyd demo --gpus 8 --microbatches 16 --max-slowdown 0.05
        gpuenergyd demo --carbon-trace synthetic
        gpuenergyd demo --real-time --hold
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
        is_in_virtual_time=not real_time and driver == "simulated",
        kills_worker_after_s=kill_worker_after_s,
    )
    check_request(request, out)
    warn_of_large_slowdown(max_slowdown)
    with _folder(keep) as (folder, inherited_fds), _progress(request, as_json=as_json) as progress:
        progress.announce(f"gpuenergyd demo on {request.gpus}: starting a private daemon")
        if not request.is_in_virtual_time and (warning := _load_warning()) is not None:
            progress.announce(warning)
        run = _run_in_virtual_time if request.is_in_virtual_time else _run_in_real_time
        run(request, folder, inherited_fds, progress, partial(_show_result, request, folder, out, as_json=as_json))
    return 0


def _load_warning() -> str | None:
    """Return the warning if too many processes compete for this host's CPUs, else None."""
    load, num_cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _BUSY_LOAD_PER_CPU * num_cpus:
        return None
    return (
        f"load {load:.0f} on {count_text(num_cpus, 'core')}: results will be noisy; without"
        " --real-time they do not depend on it"
    )


def _run_in_real_time(
    request: DemoRequest, folder: Path, inherited_fds: Sequence[int], progress: "ShownProgress", show_result: ShowResult
) -> None:
    from gpuenergyd_sim.demo.real_host import RealHost  # noqa: PLC0415  start fast
    from gpuenergyd_sim.private_daemon.processes import Children, raise_on_termination  # noqa: PLC0415

    raise_on_termination()
    with Children(folder, inherited_fds) as children:
        host = RealHost(children)
        outcome = run_session(request, folder, host, progress)
        if request.is_held:
            _show_and_hold(folder, outcome.reason, progress, show_result)
        progress.announce("stopping the daemon")
    check_clocks_are_restored(outcome.world)
    if not request.is_held:
        show_result(outcome.reason, progress)


def _run_in_virtual_time(
    request: DemoRequest, folder: Path, inherited_fds: Sequence[int], progress: "ShownProgress", show_result: ShowResult
) -> None:
    """Run the process in which everything runs in virtual time."""
    from gpuenergyd_sim.demo.virtual_files import VirtualFiles  # noqa: PLC0415
    from gpuenergyd_sim.private_daemon.processes import Children, raise_on_termination  # noqa: PLC0415  start fast

    raise_on_termination()
    files = VirtualFiles(folder)
    files.write_request(request)
    with Children(folder, inherited_fds) as children:
        # With a fixed hash seed, Python iterates over sets of strings in the same order in every run.
        demo = children.start(
            "demo", ["gpuenergyd_sim.demo.virtual_main", str(folder)], PYTHONHASHSEED="0", TMPDIR=str(folder)
        )
        while not demo.has_ended() and not (request.is_held and files.reason() is not None):
            files.show_news(progress)
            time.sleep(_LOOK_PERIOD_S)
        files.show_news(progress)  # steps since the last look
        children.check()
        reason = files.reason() or ""
        if request.is_held:
            _show_and_hold(folder, reason, progress, show_result)
            files.release()
            demo.process.wait()
            children.check()
    if not request.is_held:
        show_result(reason, progress)


def _show_and_hold(folder: Path, reason: str, progress: "ShownProgress", show_result: ShowResult) -> None:
    show_result(reason, progress)
    socket_path = folder / "run" / "gpuenergyd.sock"
    progress.announce(f"the daemon answers at {socket_path} (GPUENERGYD_SOCKET) until you press Enter")
    sys.stdin.readline()


def _show_result(
    request: DemoRequest, folder: Path, out: Path, reason: str, progress: "ShownProgress", *, as_json: bool
) -> None:
    """Write the HTML report and print the result; `reason` says why there are too few planned iterations."""
    from gpuenergyd_sim.demo.result import json_figures, print_result, result_sentence, write_report  # noqa: PLC0415  start fast

    progress.announce("writing the report")
    result = write_report(f"sqlite:///{folder / 'state' / 'history.sqlite3'}", out, job_name=JOB_NAME)
    sentence = result_sentence(result.report.summary, request, reason=reason)
    with progress.paused():
        if as_json:
            typer.echo(sentence, err=True)
            print_json(json_figures(result.report, out, request))
        else:
            print_result(result)
            typer.echo(sentence)


def _progress(request: DemoRequest, *, as_json: bool) -> "ShownProgress":
    """Return a live view for a terminal, else plain lines; with --json, they go to stderr."""
    from rich.console import Console  # noqa: PLC0415  start fast

    from gpuenergyd_sim.demo.progress import LineProgress, LiveProgress  # noqa: PLC0415

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
    from gpuenergyd_sim.private_daemon.processes import remove_on_exit  # noqa: PLC0415  start fast

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
