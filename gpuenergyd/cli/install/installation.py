"""What `install` and `uninstall` do to a host's files: planned first, then carried out, never against an edit by hand.

Every file that is written says on its first line what it contained then. So a later run knows what is still ours and
may be replaced or removed, and what somebody has changed since.
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
from gpuenergyd.errors import GpuEnergyError, UsageError

UNITS_PYTHON = "/opt/gpuenergyd/bin/python"
"""What the unit files in the sources name."""
CONFIG_PATH = Path("etc/gpuenergyd/config.toml")
STATE_DIR = Path("var/lib/gpuenergyd")
_HEADER = "# Written by gpuenergyd install {version}; unchanged while this is the SHA-256 of the rest: {digest}\n"
_HEADER_PATTERN = re.compile(r"# Written by gpuenergyd install \S+; unchanged while .*: ([0-9a-f]{64})\n")
_HIDDEN_FROM_UNITS = ("home", "root", "tmp", "run/user", "var/tmp")


class Action(StrEnum):
    """What becomes of a file."""

    WRITE = "write"
    REPLACE = "replace"
    REMOVE = "remove"
    UP_TO_DATE = "up to date"
    KEEP_CHANGED = "keep, changed by hand"
    KEEP = "keep"

    @property
    def is_change(self) -> bool:
        """Whether anything is done."""
        return self in {Action.WRITE, Action.REPLACE, Action.REMOVE}


@dataclass(frozen=True, slots=True)
class Step:
    """One file or folder, and what becomes of it."""

    action: Action
    path: Path
    content: str | None = None


def units_python(given: Path | None) -> Path:
    """Return the interpreter that the units start: this one unless another is named.

    Raises:
        UsageError: it is not absolute, or lies where the units' sandbox hides it.
    """
    python = given or Path(sys.executable)
    if not python.is_absolute():
        raise UsageError(f"--python {python}: an absolute path is needed, such as {UNITS_PYTHON}")
    needed = [python] if given else [python, python.resolve(), Path(gpuenergyd.__file__).resolve()]
    for path in needed:
        if any(path.is_relative_to(Path("/") / hidden) for hidden in _HIDDEN_FROM_UNITS):
            raise UsageError(
                f"{path} is hidden from the units, which see neither home folders nor /tmp; install into a place of its"
                " own (`python3 -m venv /opt/gpuenergyd`, with an interpreter under /usr), or name one with --python"
            )
    return python


def files_to_install(python: Path) -> dict[Path, str]:
    """Return every file's content by its path under the root.

    Raises:
        GpuEnergyError: the unit files are not there.
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


def plan_install(root: Path, python: Path, *, replaces_changed: bool) -> tuple[Step, ...]:
    """Return what installing does to each file; a changed configuration is kept in any case."""
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
        steps.append(Step(action, target, content))
    return tuple(steps)


def plan_uninstall(
    root: Path, *, removes_changed: bool, removes_config: bool, removes_history: bool
) -> tuple[Step, ...]:
    """Return what uninstalling does to each file; configuration and history stay unless their removal is asked for."""
    steps = []
    for path in files_to_install(Path(UNITS_PYTHON)):
        target = root / path
        if not os.path.lexists(target):
            continue
        is_ours = not target.is_symlink() and _is_unchanged(target)
        is_asked_for = removes_config if path == CONFIG_PATH else removes_changed
        steps.append(Step(Action.REMOVE if is_ours or is_asked_for else Action.KEEP_CHANGED, target))
    history = root / STATE_DIR
    if history.is_dir():
        steps.append(Step(Action.REMOVE if removes_history else Action.KEEP, history))
    return tuple(steps)


def carbon_said(root: Path) -> str:
    """Return whether the carbon fetcher will have anything to do, as the configuration that is there says."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  heavy: pydantic

    path = root / CONFIG_PATH
    try:
        settings = load_settings(path if path.is_file() else Path(os.devnull))
    except UsageError as error:
        return f"carbon: unknown whether a source is configured: {error}"
    if settings.asks_network:
        source = settings.carbon_source or "the zone's own source"
        return f"carbon: gpuenergyd-carbon.service asks {source} for zone {settings.carbon_zone}"
    return f"carbon: no source is configured (carbon_zone in /{CONFIG_PATH}), so gpuenergyd-carbon.service ends at once"


def carry_out(steps: Sequence[Step]) -> None:
    """Do it; a file is there as a whole or not at all.

    Raises:
        GpuEnergyError: a file cannot be written or removed; the message names it.
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
    """Return whether a file is as we once wrote it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    found = _HEADER_PATTERN.match(text)
    return found is not None and hashlib.sha256(text[found.end() :].encode()).hexdigest() == found[1]


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.chmod(0o644)
    unfinished.rename(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
        if path.name == CONFIG_PATH.name and not any(path.parent.iterdir()):
            path.parent.rmdir()
