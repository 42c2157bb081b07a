"""Builds an RPM of the daemon, with the files of the Debian package, for distributions of one version of Python.

Dependencies are names that Fedora and its relatives generate for Python packages, `python3dist(...)`. Its packages have
no folder that all versions of Python share, so the package requires the version that it was built for.
"""

import os
import shlex
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from gpuenergyd import __version__
from gpuenergyd_install.installation import compile_command
from tools.release.build import ROOT, commit_epoch_s
from tools.release.staging import MAINTAINER, PYTHON, dependencies, normalize, stage, write, write_packed

PYTHON_VERSION = "3.14"
"""That of Fedora 43."""
_RECOMMENDED = ("numba", "nvidia-ml-py")
_SPEC = """\
%global __os_install_post %{{nil}}
%global source_date_epoch_from_changelog 0
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
%global _buildhost reproducible

Name: gpuenergyd
Version: {version}
Release: 1
Summary: Daemon that reduces the energy of GPU training at the same speed
License: Apache-2.0
Group: System Environment/Daemons
Packager: {maintainer}
BuildArch: noarch
AutoReqProv: no
Requires: python(abi) = {python}
Requires: systemd >= 252
{requirements}

%description
It profiles each stage of a training pipeline, plans an SM clock for every
forward and backward pass, applies the plan while the pipeline trains, and
restores all clocks when the training or the daemon itself ends or crashes.

The services are not started: systemctl enable --now gpuenergyd.service

%install
cp -a {staged}/. %{{buildroot}}/

%post
systemd-sysusers gpuenergyd.conf
systemd-tmpfiles --create gpuenergyd.conf
{compile} || echo "gpuenergyd: the first plan compiles the planner" >&2
[ ! -d /run/systemd/system ] || systemctl --system daemon-reload

%preun
# Stopping restores every GPU. An upgrade restarts the daemon instead, which keeps the clocks of running jobs.
if [ "$1" -eq 0 ] && [ -d /run/systemd/system ]; then
    systemctl disable --now gpuenergyd.socket gpuenergyd.service
fi

%postun
[ ! -d /run/systemd/system ] || systemctl --system daemon-reload

%files
{files}

%changelog
* {date} {maintainer} - {version}-1
- See CHANGELOG.md.
"""


def build_rpm_package(wheel: Path, out: Path, *, python_version: str = PYTHON_VERSION) -> Path:
    """Build the package from a wheel into a folder and return its path (reproducible).

    Raises:
        CalledProcessError: rpmbuild failed.
    """
    epoch_s = commit_epoch_s()
    with tempfile.TemporaryDirectory() as work:
        root, spec = Path(work, "root"), Path(work, "gpuenergyd.spec")
        packages = f"usr/lib/python{python_version}/site-packages"
        stage(root, wheel, packages=packages, zsh="usr/share/zsh/site-functions")
        write(root / "usr/share/licenses/gpuenergyd/LICENSE", (ROOT / "LICENSE").read_text(encoding="utf-8"))
        write_packed(
            root / "usr/share/doc/gpuenergyd/changelog.gz", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        )
        normalize(root, epoch_s)
        write(spec, _spec(root, python_version=python_version, epoch_s=epoch_s))
        defines = {
            "_topdir": f"{work}/build",
            "_rpmdir": str(out),
            "_build_name_fmt": "%{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm",
        }
        options = [part for name, value in defines.items() for part in ("--define", f"{name} {value}")]
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
        subprocess.run(["rpmbuild", "-bb", *options, str(spec)], env=environ, check=True, capture_output=True)
    return out / f"gpuenergyd-{__version__}-1.noarch.rpm"


def _spec(root: Path, *, python_version: str, epoch_s: int) -> str:
    requirements = [
        f"{'Recommends' if name in _RECOMMENDED else 'Requires'}: python3dist({name}){f' >= {floor}' if floor else ''}"
        for name, floor in dependencies("daemon", "fast")
    ]
    return _SPEC.format(
        version=__version__,
        python=python_version,
        requirements="\n".join(requirements),
        staged=root,
        compile=shlex.join(compile_command(PYTHON)),
        files="\n".join(_files(root)),
        date=f"{datetime.fromtimestamp(epoch_s, UTC):%a %b %d %Y}",
        maintainer=MAINTAINER,
    )


def _files(root: Path) -> list[str]:
    """Return the lines of `%files`: our own folders of Python packages, and each file elsewhere."""
    lines = []
    for path in sorted(root.rglob("*")):
        place = f"/{path.relative_to(root)}"
        if path.is_dir():
            is_own = path.parent.name == "site-packages" or (path.name == "gpuenergyd" and "site-packages" not in place)
            lines += [f"%dir {place}"] if is_own or "/site-packages/" in place else []
        elif place.startswith("/etc/gpuenergyd/"):
            lines.append(f"%config(noreplace) {place}")
        else:
            kind = {"man": "%doc ", "doc": "%doc ", "licenses": "%license "}.get(path.relative_to(root).parts[2], "")
            lines.append(f"{kind}{place}")
    return lines
