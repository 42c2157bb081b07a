"""Builds a Debian package of the daemon: code, systemd units, users, folders, settings, manual pages, completions.

Dependencies are Debian packages by name and minimum version, available from Debian 13 on. The driver binding
(`nvidia-ml-py`) is only recommended: it comes from PyPI or Debian's contrib section.
"""

import os
import shlex
import subprocess
import tempfile
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from gpuenergyd import __version__
from gpuenergyd_install.installation import compile_command
from tools.release.build import ROOT, commit_epoch_s
from tools.release.staging import MAINTAINER, PYTHON, dependencies, normalize, stage, write, write_packed

_DEBIAN_NAMES = {"prometheus-client": "python3-prometheus-client", "scikit-learn": "python3-sklearn"}
_RECOMMENDED = {"nvidia-ml-py": "python3-pynvml", "numba": "python3-numba"}
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
        normalize(root, epoch_s)
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
        pack = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target)]
        subprocess.run(pack, env=environ, check=True, stdout=subprocess.DEVNULL)
    return target


def _write_files(root: Path, wheel: Path, epoch_s: int) -> None:
    stage(root, wheel, packages="usr/lib/python3/dist-packages")
    documents = root / "usr/share/doc/gpuenergyd"
    write(documents / "copyright", _COPYRIGHT)
    date = format_datetime(datetime.fromtimestamp(epoch_s, UTC))
    entry = (
        f"gpuenergyd ({__version__}-1) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- {MAINTAINER}  {date}\n"
    )
    write_packed(documents / "changelog.Debian.gz", entry)
    write_packed(documents / "changelog.gz", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def _write_control(root: Path) -> None:
    needed, recommended = _debian_dependencies()
    size_kib = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    control = f"""Package: gpuenergyd
Version: {__version__}-1
Architecture: all
Maintainer: {MAINTAINER}
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
    write(root / "DEBIAN" / "control", control)
    write(root / "DEBIAN" / "conffiles", "/etc/gpuenergyd/config.toml\n")
    for name, text in (("postinst", _POSTINST), ("prerm", _PRERM), ("postrm", _POSTRM)):
        write(root / "DEBIAN" / name, text, mode=0o755)


def _debian_dependencies() -> tuple[list[str], list[str]]:
    """Return the daemon's required and recommended dependencies under their Debian names."""
    needed = [
        f"{_DEBIAN_NAMES.get(name, f'python3-{name}')}{f' (>= {floor})' if floor else ''}"
        for name, floor in dependencies("daemon", "fast")
        if name not in _RECOMMENDED
    ]
    return needed, sorted(_RECOMMENDED.values())
