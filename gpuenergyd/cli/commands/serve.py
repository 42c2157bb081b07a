"""`gpuenergyd serve`: the daemon, in the foreground."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file; its keys are these options.")] = None,
    mode: Annotated[str | None, typer.Option(help="control, or observe: measure and change nothing.")] = None,
    driver: Annotated[str | None, typer.Option(help="nvml, or simulated.")] = None,
    world_path: Annotated[
        Path | None, typer.Option("--world", "--world-path", metavar="PATH", help="Where the simulated GPUs live.")
    ] = None,
    runtime_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Sockets and the restore journal.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The history.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Policy of jobs that name none.")] = None,
    max_slowdown_ratio: Annotated[
        float | None,
        typer.Option(
            "--max-slowdown",
            "--max-slowdown-ratio",
            metavar="RATIO",
            help="How much slower than un-tuned a job may become: 0.05 is 5 %.",
        ),
    ] = None,
    baseline_iterations: Annotated[
        int | None, typer.Option(metavar="N", help="Un-tuned iterations that savings are compared with.")
    ] = None,
    sample_period_s: Annotated[
        float | None,
        typer.Option("--sample-period", "--sample-period-s", metavar="S", help="Time between two readings of a GPU."),
    ] = None,
) -> int:
    """Run the daemon in the foreground.

    It starts its GPU worker and its policy host itself and stops them with it.
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
    from gpuenergyd.daemon.app import serve as serve_daemon  # noqa: PLC0415  heavy: aiohttp, SQLAlchemy

    return serve_daemon(settings)
