"""Runs `gpuenergyd plan` and `explain` in this process, and a profile to run them on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from gpuenergyd_plan.command import plan


def output_of(command: Callable[..., Any], *arguments: str | Path) -> str:
    """Return what a command prints in a terminal of 80 columns; its own errors are raised."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def plan_figures(*arguments: str | Path) -> dict[str, Any]:
    """Return the JSON of `gpuenergyd plan`."""
    figures: dict[str, Any] = json.loads(output_of(plan, *arguments, "--json"))
    return figures


def write_table(folder: Path, *, clock_step_mhz: int) -> Path:
    """Write a profile of four unequal stages whose clocks trade time for energy."""
    rows = ["stage,instruction,frequency,time,energy"]
    for stage, weight in enumerate((1.0, 1.1, 1.05, 1.2)):
        for word, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in range(1400, 600, -clock_step_mhz):
                time_s = 0.01 * weight * work * (0.3 + 0.7 * 1400 / mhz)
                rows.append(f"{stage},{word},{mhz},{time_s!r},{time_s * (100 + 300 * (mhz / 1400) ** 3)!r}")
    path = folder / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    return path
