"""File changes of `gpuenergyd install` and `uninstall`: planned first, then applied; edited files are kept.

The first line of every installed file holds the SHA-256 of the rest. A later run replaces or removes only files that
still match, so that an administrator's edits survive.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import gpuenergyd
from gpuenergyd import __version__
from gpuenergyd.atomic_file import replace_file
from gpuenergyd.errors import GpuEnergyError, UsageError

UNITS_PYTHON = "/opt/gpuenergyd/bin/python"
"""Interpreter that the unit files in the sources name."""
CONFIG_PATH = Path("etc/gpuenergyd/config.toml")
STATE_DIR = Path("var/lib/gpuenergyd")
CACHE_DIR = Path("var/cache/gpuenergyd")
"""Cache of the planner's compiled code; `gpuenergyd-policy@.service` names it too."""
_HEADER = "# Written by gpuenergyd install {version}; unedited while the SHA-256 of the rest is: {digest}\n"
_HEADER_PATTERN = re.compile(r"# Written by gpuenergyd install \S+; un(?:changed|edited) while .*: ([0-9a-f]{64})\n")
_HIDDEN_FROM_UNITS = ("home", "root", "tmp", "run/user", "var/tmp")


class Action(StrEnum):
    """What is done with one file."""

    WRITE = "write"
    REPLACE = "replace"
    REMOVE = "remove"
    UP_TO_DATE = "up to date"
    KEEP_CHANGED = "keep, edited"
    KEEP = "keep"

    @property
    def is_change(self) -> bool:
        return self in {Action.WRITE, Action.REPLACE, Action.REMOVE}


@dataclass(frozen=True, slots=True)
class FileStep:
    """A file or folder and what is done with it."""

    action: Action
    path: Path
    content: str | None = None


def units_python(given: Path | None) -> Path:
    """Return the Python interpreter that the units use: the given one, else the running one.

    Raises:
        UsageError: the path is relative, or hidden by the sandbox of the units.
    """
    python = given or Path(sys.executable)
    if not python.is_absolute():
        raise UsageError(f"--python {python}: must be an absolute path such as {UNITS_PYTHON}")
    needed = [python] if given else [python, python.resolve(), Path(gpuenergyd.__file__).resolve()]
    for path in needed:
        if any(path.is_relative_to(Path("/") / hidden) for hidden in _HIDDEN_FROM_UNITS):
            raise UsageError(
                f"{path} is hidden from the sandboxed units, which cannot read home folders or /tmp; install gpuenergyd"
                " elsewhere (`python3 -m venv /opt/gpuenergyd`, with an interpreter under /usr), or set --python"
            )
    return python


def files_to_install(python: Path) -> dict[Path, str]:
    """Return the content of every installed file by its path below the root.

    Raises:
        GpuEnergyError: the unit files are missing.
    """
    source = _units_folder()
    files = {}
    for unit in sorted([*source.glob("*.service"), *source.glob("*.socket")]):
        text = unit.read_text(encoding="utf-8").replace(UNITS_PYTHON, str(python))
        files[Path("etc/systemd/system") / unit.name] = text
    for kind in ("sysusers.d", "tmpfiles.d"):
        files[Path("etc") / kind / "gpuenergyd.conf"] = (source / kind / "gpuenergyd.conf").read_text(encoding="utf-8")
    defaults = Path(gpuenergyd.__file__).parent / "daemon" / "default_config.toml"
    files[CONFIG_PATH] = defaults.read_text(encoding="utf-8")
    return files


def plan_install(root: Path, python: Path, *, replaces_changed: bool) -> tuple[FileStep, ...]:
    """Return the action for each file on install; an edited configuration is always kept."""
    steps = []
    for path, text in files_to_install(python).items():
        content, target = _signed(text), root / path
        if not os.path.lexists(target):
            action = Action.WRITE
        elif target.is_symlink() or not _is_unchanged(target):
            may_replace = replaces_changed and path != CONFIG_PATH and not target.is_symlink()
            action = Action.REPLACE if may_replace else Action.KEEP_CHANGED
        else:
            action = Action.UP_TO_DATE if target.read_text(encoding="utf-8") == content else Action.REPLACE
        steps.append(FileStep(action, target, content))
    return tuple(steps)


def plan_uninstall(
    root: Path, *, removes_changed: bool, removes_config: bool, removes_history: bool
) -> tuple[FileStep, ...]:
    """Return the action for each file on uninstall; configuration and history stay unless the flags remove them."""
    steps = []
    for path in files_to_install(Path(UNITS_PYTHON)):
        target = root / path
        if not os.path.lexists(target):
            continue
        is_ours = not target.is_symlink() and _is_unchanged(target)
        is_requested = removes_config if path == CONFIG_PATH else removes_changed
        steps.append(FileStep(Action.REMOVE if is_ours or is_requested else Action.KEEP_CHANGED, target))
    if (root / CACHE_DIR).is_dir():
        steps.append(FileStep(Action.REMOVE, root / CACHE_DIR))
    history = root / STATE_DIR
    if history.is_dir():
        steps.append(FileStep(Action.REMOVE if removes_history else Action.KEEP, history))
    return tuple(steps)


def compile_command(python: Path | str) -> tuple[str, ...]:
    """Return the command that compiles the planner into the cache of the policy hosts, as their user."""
    environment = ("env", "--chdir=/", f"NUMBA_CACHE_DIR=/{CACHE_DIR}")
    module = ("-I", "-m", "gpuenergyd_policies.planning.kernel_cache")
    return ("runuser", "-u", "gpuenergyd-policy", "--", *environment, str(python), *module)


def mode_text(root: Path) -> str:
    """Return one line on whether the daemon to be installed will set clocks, and how to change that."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  heavy: pydantic

    path = root / CONFIG_PATH
    control = f'set mode = "control" in /{CONFIG_PATH}, then `systemctl restart gpuenergyd`'
    try:
        before = load_settings(path) if path.is_file() else None
    except UsageError as error:
        return f"mode: the configuration is invalid: {error}"
    if before is not None and not before.is_observing:
        return f"mode: control; the daemon sets clocks (/{CONFIG_PATH})"
    if before is not None and before.mode_note is not None:
        return (
            f"mode: /{CONFIG_PATH} set none, with which the daemon set clocks up to version 0.3; from now on it only"
            f" observes. To go on setting clocks, {control}"
        )
    return (
        "mode: observe; the daemon measures and changes no GPU. When `gpuenergyd status` shows predicted savings that"
        f" are worth it, {control}"
    )


def carbon_text(root: Path) -> str:
    """Return one line that says which carbon source the installed configuration selects."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  heavy: pydantic

    path = root / CONFIG_PATH
    try:
        settings = load_settings(path) if path.is_file() else None
    except UsageError as error:
        return f"carbon: the configuration is invalid: {error}"
    if settings is not None and settings.needs_carbon_fetcher:
        source = settings.carbon_source or "the zone's own source"
        return f"carbon: gpuenergyd-carbon.service queries {source} for zone {settings.carbon_zone}"
    return f"carbon: no source configured (carbon_zone in /{CONFIG_PATH}); gpuenergyd-carbon.service exits at once"


def apply_steps(steps: Sequence[FileStep]) -> None:
    """Apply the changes; files are written atomically.

    Raises:
        GpuEnergyError: a file cannot be written or removed; the message names the file.
    """
    for step in steps:
        try:
            if step.action is Action.REMOVE:
                _remove(step.path)
            elif step.action.is_change and step.content is not None:
                _write(step.path, step.content)
        except OSError as error:
            raise GpuEnergyError(f"{step.path}: {error.strerror}") from None


def _units_folder() -> Path:
    package = Path(gpuenergyd.__file__).parent
    for folder in (package / "systemd", package.parent / "systemd"):
        if (folder / "gpuenergyd.service").is_file():
            return folder
    raise GpuEnergyError(f"the unit files are missing from {package}; install gpuenergyd again")


def _signed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return _HEADER.format(version=__version__, digest=digest) + text


def _is_unchanged(path: Path) -> bool:
    """Return whether a file still matches the checksum in its first line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = _HEADER_PATTERN.match(text)
    return header is not None and hashlib.sha256(text[header.end() :].encode()).hexdigest() == header[1]


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.encode(), mode=0o644)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
        if path.name == CONFIG_PATH.name and not any(path.parent.iterdir()):
            path.parent.rmdir()
