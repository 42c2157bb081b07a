"""Builds a Debian package of the daemon: code, systemd units, users, folders, settings, manual pages, completions.

Dependencies are Debian packages by name and minimum version, available from Debian 13 on. The driver binding
(`nvidia-ml-py`) is only recommended: it comes from PyPI or Debian's contrib section.
"""

import gzip
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from packaging.requirements import Requirement

from gpuenergyd import __version__
from gpuenergyd.cli.help.manual_pages import manual_pages, section_folder
from gpuenergyd_install.installation import compile_command, files_to_install
from tools.release.build import ROOT, commit_epoch_s

PYTHON = Path("/usr/bin/python3")
_MAINTAINER = "gpuenergyd developers <maintainers@gpuenergyd.invalid>"
_DEBIAN_NAMES = {"prometheus-client": "python3-prometheus-client", "scikit-learn": "python3-sklearn"}
_RECOMMENDED = {"nvidia-ml-py": "python3-pynvml", "numba": "python3-numba"}
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/gpuenergyd",
    "zsh": "usr/share/zsh/vendor-completions/_gpuenergyd",
    "fish": "usr/share/fish/vendor_completions.d/gpuenergyd.fish",
}
_FOLDERS = {
    "etc/systemd/system": "usr/lib/systemd/system",
    "etc/sysusers.d": "usr/lib/sysusers.d",
    "etc/tmpfiles.d": "usr/lib/tmpfiles.d",
}
"""Folders of `gpuenergyd install` and the corresponding folders of a package."""

_LAUNCHER = "#!/usr/bin/python3\nfrom gpuenergyd.cli.main import main\n\nmain()\n"
_POSTINST = f"""#!/bin/sh
set -e
if [ "$1" = configure ]; then
    if [ -n "$2" ] && dpkg --compare-versions "$2" le 0.3.0-1; then
        echo "gpuenergyd: from now on the daemon observes unless /etc/gpuenergyd/config.toml sets mode = control" >&2
    fi
    systemd-sysusers ${{DPKG_ROOT:+--root="$DPKG_ROOT"}} gpuenergyd.conf
    systemd-tmpfiles ${{DPKG_ROOT:+--root="$DPKG_ROOT"}} --create gpuenergyd.conf
    if [ -z "$DPKG_ROOT" ]; then
        {shlex.join(compile_command(PYTHON))} || echo "gpuenergyd: the first plan compiles the planner" >&2
    fi
    if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload
    fi
fi
"""
_PRERM = """#!/bin/sh
set -e
# Stopping restores every GPU. An upgrade restarts the daemon instead, which keeps the clocks of running jobs.
if [ "$1" = remove ] && [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now gpuenergyd.socket gpuenergyd.service
fi
"""
_POSTRM = """#!/bin/sh
set -e
if [ "$1" = purge ]; then
    rm -rf "$DPKG_ROOT/var/lib/gpuenergyd" "$DPKG_ROOT/var/cache/gpuenergyd"
fi
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload
fi
"""
_COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: gpuenergyd

Files: *
Copyright: 2026 gpuenergyd developers
License: Apache-2.0
 On Debian systems the full text of the Apache License 2.0 is in
 /usr/share/common-licenses/Apache-2.0.
"""


def build_debian_package(wheel: Path, out: Path) -> Path:
    """Build the package from a wheel into a folder and return its path (reproducible).

    Raises:
        CalledProcessError: dpkg-deb failed.
    """
    target = out / f"gpuenergyd_{__version__}-1_all.deb"
    epoch_s = commit_epoch_s()
    with tempfile.TemporaryDirectory() as work:
        root = Path(work, "root")
        _write_files(root, wheel, epoch_s)
        _write_control(root)
        _normalize(root, epoch_s)
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
        pack = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target)]
        subprocess.run(pack, env=environ, check=True, stdout=subprocess.DEVNULL)
    return target


def _write_files(root: Path, wheel: Path, epoch_s: int) -> None:
    packages = root / "usr/lib/python3/dist-packages"
    with zipfile.ZipFile(wheel) as archive:
        elsewhere = (f"gpuenergyd-{__version__}.data/", "gpuenergyd/systemd/")  # manual pages and units: see below
        names = [name for name in archive.namelist() if not name.endswith(("/RECORD", "/LICENSE"))]
        archive.extractall(packages, [name for name in names if not name.startswith(elsewhere)])
    for path, text in files_to_install(PYTHON).items():
        folder = _FOLDERS.get(str(path.parent), str(path.parent))
        _write(root / folder / path.name, text)
    _write(root / "usr/bin/gpuenergyd", _LAUNCHER, mode=0o755)
    for name, text in manual_pages().items():
        _write_packed(root / "usr/share/man" / section_folder(name) / f"{name}.gz", text)
    for shell, place in _COMPLETIONS.items():
        _write(root / place, _completion(shell))
    documents = root / "usr/share/doc/gpuenergyd"
    _write(documents / "copyright", _COPYRIGHT)
    date = format_datetime(datetime.fromtimestamp(epoch_s, UTC))
    entry = (
        f"gpuenergyd ({__version__}-1) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- {_MAINTAINER}  {date}\n"
    )
    _write_packed(documents / "changelog.Debian.gz", entry)
    _write_packed(documents / "changelog.gz", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def _write_control(root: Path) -> None:
    needed, recommended = _debian_dependencies()
    size_kib = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    control = f"""Package: gpuenergyd
Version: {__version__}-1
Architecture: all
Maintainer: {_MAINTAINER}
Installed-Size: {size_kib}
Depends: {", ".join(["python3 (>= 3.11)", "systemd (>= 252)", *needed])}
Recommends: {", ".join(recommended)}
Section: science
Priority: optional
Description: daemon that reduces the energy of GPU training at the same speed
 It profiles each stage of a training pipeline, plans an SM clock for every
 forward and backward pass, applies the plan while the pipeline trains, and
 restores all clocks when the training or the daemon itself ends or crashes.
 .
 The services are not started: systemctl enable --now gpuenergyd.service
"""
    _write(root / "DEBIAN" / "control", control)
    _write(root / "DEBIAN" / "conffiles", "/etc/gpuenergyd/config.toml\n")
    for name, text in (("postinst", _POSTINST), ("prerm", _PRERM), ("postrm", _POSTRM)):
        _write(root / "DEBIAN" / name, text, mode=0o755)


def _debian_dependencies() -> tuple[list[str], list[str]]:
    """Return the daemon's required and recommended dependencies under their Debian names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = [Requirement(text) for extra in ("daemon", "fast") for text in extras[extra]]
    needed = []
    for requirement in requirements:
        if requirement.name not in _RECOMMENDED:
            name = _DEBIAN_NAMES.get(requirement.name, f"python3-{requirement.name}")
            floors = [spec.version for spec in requirement.specifier if spec.operator == ">="]
            needed.append(f"{name} (>= {floors[0]})" if floors else name)
    return needed, sorted(_RECOMMENDED.values())


def _completion(shell: str) -> str:
    """Return the completion script that the program generates for a shell."""
    environ = {**os.environ, "_GPUENERGYD_COMPLETE": f"source_{shell}"}
    program = "from gpuenergyd.cli.main import main; main()"
    script = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return script.stdout.strip() + "\n"


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _write_packed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _normalize(root: Path, epoch_s: int) -> None:
    """Normalize permissions and modification times, independent of umask and build time."""
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif not path.stat().st_mode & 0o100:
            path.chmod(0o644)
        os.utime(path, (epoch_s, epoch_s))
