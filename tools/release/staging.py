"""The files of the daemon as packages of distributions install them: code, units, manual pages, completions."""

import gzip
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from docs.site.manual.manual_pages import manual_pages, section_folder
from gpuenergyd import __version__
from gpuenergyd_install.installation import files_to_install
from tools.release.build import ROOT

PYTHON = Path("/usr/bin/python3")
MAINTAINER = "gpuenergyd developers <maintainers@gpuenergyd.invalid>"
ZSH_OF_DEBIAN = "usr/share/zsh/vendor-completions"
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/gpuenergyd",
    "zsh": "{zsh}/_gpuenergyd",
    "fish": "usr/share/fish/vendor_completions.d/gpuenergyd.fish",
}
_FOLDERS = {
    "etc/systemd/system": "usr/lib/systemd/system",
    "etc/sysusers.d": "usr/lib/sysusers.d",
    "etc/tmpfiles.d": "usr/lib/tmpfiles.d",
}
"""Folders of `gpuenergyd install` and the corresponding folders of a package."""
_LAUNCHER = "#!/usr/bin/python3\nfrom gpuenergyd.cli.main import main\n\nmain()\n"


def stage(root: Path, wheel: Path, *, packages: str, zsh: str = ZSH_OF_DEBIAN) -> None:
    """Write the files below a root; `packages` and `zsh` are the folders of Python packages and zsh's completions."""
    with zipfile.ZipFile(wheel) as archive:
        elsewhere = (f"gpuenergyd-{__version__}.data/", "gpuenergyd/systemd/")  # manual pages and units: see below
        names = [name for name in archive.namelist() if not name.endswith(("/RECORD", "/LICENSE"))]
        archive.extractall(root / packages, [name for name in names if not name.startswith(elsewhere)])
    for path, text in files_to_install(PYTHON).items():
        folder = _FOLDERS.get(str(path.parent), str(path.parent))
        write(root / folder / path.name, text)
    write(root / "usr/bin/gpuenergyd", _LAUNCHER, mode=0o755)
    for name, text in manual_pages().items():
        write_packed(root / "usr/share/man" / section_folder(name) / f"{name}.gz", text)
    for shell, place in _COMPLETIONS.items():
        write(root / place.format(zsh=zsh), _completion(shell))


def dependencies(*extras: str) -> Iterator[tuple[str, str | None]]:
    """Yield name and minimum version of each package that these extras require."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for requirement in (Requirement(text) for extra in extras for text in listed[extra]):
        floors = [spec.version for spec in requirement.specifier if spec.operator == ">="]
        yield requirement.name, floors[0] if floors else None


def _completion(shell: str) -> str:
    """Return the completion script that the program generates for a shell."""
    environ = {**os.environ, "_GPUENERGYD_COMPLETE": f"source_{shell}"}
    program = "from gpuenergyd.cli.main import main; main()"
    script = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return script.stdout.strip() + "\n"


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def write_packed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def normalize(root: Path, epoch_s: int) -> None:
    """Normalize permissions and modification times, independent of umask and build time."""
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif not path.stat().st_mode & 0o100:
            path.chmod(0o644)
        os.utime(path, (epoch_s, epoch_s))
