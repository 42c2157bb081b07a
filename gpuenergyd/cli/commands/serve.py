"""`gpuenergyd serve`: runs the daemon in the foreground."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.option_checks import warn_of_large_slowdown
from gpuenergyd.cli.options import MaxSlowdownOption


def serve(  # noqa: PLR0913  each option is a parameter
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration file (TOML).")] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="control|observe", help="observe changes nothing; control sets clocks.")
    ] = None,
    driver: Annotated[str | None, typer.Option(metavar="nvml|simulated", help="GPU driver.")] = None,
    world_path: Annotated[
        Path | None, typer.Option("--world", metavar="PATH", help="Folder of the simulated GPUs.")
    ] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for sockets and the restore journal.")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the history.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Clock policy of jobs that do not set one.")
    ] = None,
    max_slowdown_ratio: MaxSlowdownOption = None,
    baseline_iterations: Annotated[
        int | None, typer.Option(metavar="N", help="Iterations at full speed that form the baseline.")
    ] = None,
    sample_period_s: Annotated[
        float | None, typer.Option("--sample-period-s", metavar="S", help="Sampling period of GPU counters in seconds.")
    ] = None,
) -> int:
    """Run the daemon in the foreground.

    Starts the GPU worker and the policy host as child processes and stops them on exit. Where neither --mode nor the
    settings give a mode, real GPUs are observed and simulated ones controlled.

    Examples:
        gpuenergyd serve
        gpuenergyd serve --mode control
        gpuenergyd serve --driver simulated --world world --runtime-dir run --state-dir state
    """
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  heavy: pydantic

    settings = load_settings(
        config,
        mode=mode,
        driver=driver,
        world_path=world_path,
        runtime_dir=runtime_dir,
        state_dir=state_dir,
        policy=policy,
        max_slowdown_ratio=max_slowdown_ratio,
        baseline_iterations=baseline_iterations,
        sample_period_s=sample_period_s,
    )
    warn_of_large_slowdown(settings.default_budget_ratio)
    from gpuenergyd.daemon.app import serve as serve_daemon  # noqa: PLC0415  heavy: aiohttp, SQLAlchemy

    return serve_daemon(settings)
