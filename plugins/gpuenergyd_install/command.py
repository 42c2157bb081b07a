"""`gpuenergyd install` and `uninstall`: systemd units, system users, folders and the default configuration."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.options import DryRunOption, JsonOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import AccessError, GpuEnergyError, UsageError
from gpuenergyd_install.installation import (
    Action,
    FileStep,
    apply_steps,
    carbon_text,
    compile_command,
    mode_text,
    plan_install,
    plan_uninstall,
    units_python,
)

_START = ("systemctl", "enable", "--now", "gpuenergyd.service")
_RELOAD = ("systemctl", "daemon-reload")
_AFTER_INSTALL = (
    ("systemd-sysusers", "/etc/sysusers.d/gpuenergyd.conf"),
    ("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/gpuenergyd.conf"),
    _RELOAD,
)

RootOption = Annotated[
    Path, typer.Option("--root", metavar="DIR", help="Install below DIR, e.g. for an image; starts nothing.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Also replace or remove units edited since.")]


def install(
    *,
    root: RootOption = Path("/"),
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Python interpreter of the units [default: this one].")
    ] = None,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Install the daemon as systemd services.

    Writes the units of all processes, their users and folders, and /etc/gpuenergyd/config.toml, with mode = "observe"
    and every other key commented out, and compiles the planner. Keeps files that were edited since. Starts nothing, but
    prints the command that does, and how to go from observing to setting clocks.

    Examples:
        gpuenergyd install --dry-run
        gpuenergyd install
        gpuenergyd install --root /mnt/image --python /opt/gpuenergyd/bin/python
    """
    is_this_host = _is_this_host(root)
    interpreter = units_python(python)
    steps = plan_install(root, interpreter, replaces_changed=force)
    mode = mode_text(root)
    compile_planner = compile_command(interpreter)
    commands = (*_AFTER_INSTALL, compile_planner) if is_this_host else ()
    if not dry_run:
        _require_root_user(is_this_host, "install")
        apply_steps(steps)
        for command in commands:
            if command is compile_planner:
                _compile_planner(command)
            else:
                _run(command)
    next_command = _START if is_this_host else None
    settings = {"carbon": carbon_text(root), "mode": mode}
    _print_outcome(steps, commands, is_dry_run=dry_run, next_command=next_command, as_json=as_json, settings=settings)
    return 0


def uninstall(
    *,
    root: RootOption = Path("/"),
    force: ForceOption = False,
    config: Annotated[bool, typer.Option("--config", help="Also remove an edited configuration.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Also remove the history of jobs and energy.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Stop and remove the systemd services.

    Stopping the services restores all GPUs. Edited files, the configuration and the history stay unless --force,
    --config or --history is given; the system users stay.

    Examples:
        gpuenergyd uninstall --dry-run
        gpuenergyd uninstall --config --history
    """
    is_this_host = _is_this_host(root)
    steps = plan_uninstall(root, removes_changed=force, removes_config=config, removes_history=history)
    units = [step.path.name for step in steps if step.action is Action.REMOVE and step.path.parent.name == "system"]
    stop = ("systemctl", "disable", "--now", *(name for name in units if "@" not in name))
    commands: tuple[Sequence[str], ...] = (stop, _RELOAD) if is_this_host and units else ()
    if not dry_run:
        _require_root_user(is_this_host, "uninstall")
        for command in commands[:1]:
            _run(command)
        apply_steps(steps)
        for command in commands[1:]:
            _run(command)
    _print_outcome(steps, commands, is_dry_run=dry_run, next_command=None, as_json=as_json)
    return 0


def _is_this_host(root: Path) -> bool:
    if not root.is_dir():
        raise UsageError(f"--root {root}: no such folder")
    return root.resolve() == Path("/")


def _require_root_user(is_this_host: bool, name: str) -> None:
    if is_this_host and os.geteuid() != 0:
        raise AccessError(
            f"{name} needs root, not uid {os.geteuid()}: `sudo gpuenergyd {name}`; --dry-run works without"
        )


def _compile_planner(command: Sequence[str]) -> None:
    """Compile the planner ahead of the first plan; a failure only delays that plan."""
    typer.echo("compiling the planner, about 20 s", err=True)
    try:
        _run(command)
    except GpuEnergyError as error:
        typer.echo(f"warning: {error}; the first plan compiles the planner instead", err=True)


def _run(command: Sequence[str]) -> None:
    """Run a systemd command; skip it on hosts without systemd.

    Raises:
        GpuEnergyError: the command fails; the message contains its stderr.
    """
    if shutil.which(command[0]) is None:
        typer.echo(f"skipped, {command[0]} is not installed: {' '.join(command)}", err=True)
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not _is_without_systemd(done.stderr):
        raise GpuEnergyError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def _is_without_systemd(stderr: str) -> bool:
    """Return whether systemd is installed but not running, as in most containers."""
    return "not been booted with systemd" in stderr or "Failed to connect to bus" in stderr


def _print_outcome(
    steps: Sequence[FileStep],
    commands: Sequence[Sequence[str]],
    *,
    is_dry_run: bool,
    next_command: Sequence[str] | None,
    as_json: bool,
    settings: Mapping[str, str] | None = None,
) -> None:
    if as_json:
        print_json(
            {
                "is_dry_run": is_dry_run,
                "files": [{"path": step.path, "action": step.action} for step in steps],
                "commands": [" ".join(command) for command in commands],
                "next_command": " ".join(next_command) if next_command else None,
                **(settings or {}),
            }
        )
        return
    if is_dry_run:
        typer.echo("dry run, nothing was changed; steps:")
    for step in steps:
        typer.echo(f"{step.action}: {step.path}")
    for command in commands:
        typer.echo(f"run: {' '.join(command)}")
    if not any(step.action.is_change for step in steps):
        typer.echo("nothing to change")
    if any(step.action is Action.KEEP_CHANGED for step in steps):
        typer.echo("edited files were kept; --help lists the options that replace or remove them")
    if next_command:
        typer.echo(f"start it with: {' '.join(next_command)}")
    for line in (settings or {}).values():
        typer.echo(line)
