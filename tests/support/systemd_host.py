"""A separate host for a test: a real systemd as process 1 in namespaces, with this checkout installed.

It runs on a temporary overlay of this machine's root folder. The namespaces need root; if they are not permitted,
`why_not` returns the reason and tests skip.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.support.processes import finished
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path("/opt/gpuenergyd")
SYSTEMD = "/lib/systemd/systemd"
_NAMESPACES = "--cgroup --pid --uts --ipc --mount --fork --kill-child"

_PREPARE = r"""
set -e
work=$1 tree=$2 base=$3 site=$4 name=$5
mount -t tmpfs none "$work/fs"
mkdir "$work/fs/upper" "$work/fs/work" "$work/fs/root"
mount -t overlay -o lowerdir=/,upperdir="$work/fs/upper",workdir="$work/fs/work" none "$work/fs/root"
cd "$work/fs/root"
mount -t proc none proc
mount -t tmpfs none run
mount -t tmpfs none tmp
mount --rbind /sys sys
umount -l sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 none sys/fs/cgroup
mount --rbind /dev dev
mkdir -p opt/tree opt/base opt/site opt/gpuenergyd/bin "opt/gpuenergyd/lib/$name/site-packages" var/lib/gpuenergyd
mount --bind "$tree" opt/tree
mount --bind "$base" opt/base
mount --bind "$site" opt/site
mount --bind "$work/shared" mnt
ln -sf "/opt/base/bin/$name" opt/gpuenergyd/bin/python
printf 'home = /opt/base/bin\n' > opt/gpuenergyd/pyvenv.cfg
printf '/opt/tree\n/opt/tree/policies\n/opt/tree/trainers\n/opt/tree/plugins\n/opt/site\n' \
  > "opt/gpuenergyd/lib/$name/site-packages/tree.pth"
rm -rf etc/gpuenergyd etc/systemd/system/*.wants
cp -r "$work/etc/." etc/
cp -r "$work/site/." "opt/gpuenergyd/lib/$name/site-packages/"
mkdir -p etc/systemd/system.conf.d
# An interpreter that was built elsewhere finds its own library first.
printf '[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH=/opt/base/lib\n' > etc/systemd/system.conf.d/library.conf
cp -r "$work/units" run/systemd-units
mkdir -p run/systemd
mv run/systemd-units run/systemd/system
mkdir -p run/old
# Not chroot: a process in one may not make the user namespaces of PrivateUsers=.
pivot_root . run/old
cd /
umount -l /run/old
systemd-sysusers >/dev/null 2>&1
systemd-tmpfiles --create /etc/tmpfiles.d/gpuenergyd.conf
exec env -i container=lxc PATH=/usr/bin:/bin:/usr/sbin:/sbin \
  "$6" --system --unit=test.target --log-target=console --show-status=no
"""


def why_not() -> str | None:
    """Return why such a host cannot be created, None if it can."""
    if os.geteuid() != 0:
        return "namespaces for a systemd of our own need root"
    for command in ("unshare", "systemd-sysusers", "systemctl"):
        if shutil.which(command) is None:
            return f"no {command} here: install the Debian package systemd"
    if not Path(SYSTEMD).exists():
        return "no systemd here: install the Debian package systemd"
    tried = finished(
        ["unshare", *_NAMESPACES.split(), "sh", "-c", "mount -t tmpfs none /mnt && mount -t cgroup2 none /mnt"]
    )
    return None if tried.returncode == 0 else f"namespaces are refused here: {tried.stderr.strip()}"


@dataclass(slots=True)
class SystemdHost:
    """A running host; `shared` is its /mnt."""

    folder: Path
    process: subprocess.Popen[bytes]
    init_pid: int

    @property
    def shared(self) -> Path:
        """Folder shared between both sides."""
        return self.folder / "shared"

    @property
    def console(self) -> str:
        """Log output of systemd and its services so far."""
        return (self.folder / "console").read_text(encoding="utf-8", errors="replace")

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that runs on the host."""
        inside = ["nsenter", "--target", str(self.init_pid), "--all", "--root", "--wd=/"]
        return [*inside, "env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "LD_LIBRARY_PATH=/opt/base/lib", *arguments]

    def run(self, *arguments: str, timeout_s: float = LIMIT_S) -> str:
        """Run a command on the host and return its output."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}\n{self.console[-6000:]}"
        return done.stdout

    def systemctl(self, *arguments: str) -> str:
        return self.run("systemctl", *arguments)

    def property_of(self, unit: str, name: str) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def main_pid(self, unit: str) -> int:
        """Return the main pid of a service in the host's namespace, 0 if there is none."""
        return int(self.property_of(unit, "MainPID"))

    def signal(self, unit: str, number: signal.Signals) -> int:
        """Send a signal to the main process of a service; return the monotonic instant in ns before it."""
        pid = self.main_pid(unit)
        before_ns = time.monotonic_ns()
        self.run("kill", f"-{number.value}", str(pid))
        return before_ns


@contextmanager
def systemd_host(
    folder: Path, *, units: dict[str, str], etc: Path, site: dict[str, str], wanted: Sequence[str] = ()
) -> Iterator[SystemdHost]:
    """Boot a host with these unit files, files under /etc, and additional Python modules."""
    for name in ("fs", "shared", "units", "cgroup", "site"):
        (folder / name).mkdir(parents=True)
    (folder / "shared").chmod(0o777)
    shutil.copytree(etc, folder / "etc")
    target = ["[Unit]", "DefaultDependencies=no", *(f"Wants={unit}" for unit in wanted)]
    for name, text in {**units, "test.target": "\n".join(target) + "\n"}.items():
        (folder / "units" / name).parent.mkdir(exist_ok=True)
        (folder / "units" / name).write_text(text, encoding="utf-8")
    for name, text in site.items():
        (folder / "site" / name).parent.mkdir(exist_ok=True)
        (folder / "site" / name).write_text(text, encoding="utf-8")
    (folder / "prepare").write_text(_PREPARE, encoding="utf-8")
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Packages may be installed in an environment that this one shares.
    site_packages = Path(msgspec.__file__).parents[1]
    arguments = [str(folder), str(ROOT), sys.base_prefix, str(site_packages), name, SYSTEMD]
    inner = " ".join(["exec unshare", _NAMESPACES, "sh", str(folder / "prepare"), *arguments])
    # Its own control group, which systemd may divide.
    outer = (
        f"mount -t cgroup2 none {folder}/cgroup && mkdir {folder}/cgroup/{folder.name}-$$ &&"
        f" echo $$ > {folder}/cgroup/{folder.name}-$$/cgroup.procs && {inner}"
    )
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", outer], stdin=subprocess.DEVNULL, stdout=console, stderr=console
        )
        try:
            host = SystemdHost(folder, process, _wait_for_init(process, folder))
            wait_until(lambda: _is_booted(host))
            yield host
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(LIMIT_S)
            _remove_control_group(folder)


def _wait_for_init(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Return the pid, in the outer namespace, of process 1 of the host."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found: list[int] = []

    def is_there() -> bool:
        assert process.poll() is None, (folder / "console").read_text(errors="replace")
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    found.append(int(pid))
        return bool(found)

    wait_until(is_there)
    return found[0]


def _remove_control_group(folder: Path) -> None:
    """Remove the control group once the processes in it have ended."""
    sweep = f"mount -t cgroup2 none {folder}/cgroup && find {folder}/cgroup/{folder.name}-* -depth -type d -delete"

    def is_gone() -> bool:
        done = subprocess.run(["unshare", "--mount", "sh", "-c", sweep], capture_output=True, check=False)
        return done.returncode == 0 or b"No such file" in done.stderr

    wait_until(is_gone)


def _is_booted(host: SystemdHost) -> bool:
    done = subprocess.run(
        host.command("systemctl", "is-active", "test.target"), capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "active"
