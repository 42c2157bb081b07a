"""Makes an environment beside the one in use: the same packages, a tree of its own, and what it alone has installed.

Tools that change how everything runs (coverage: numba loads it wherever it finds it) must not stay in `.venv`. Daemons
and trainers that tests start with `python -I` ignore PYTHONPATH; a twin's interpreter finds its tree all the same.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.running import ROOT

INSTALL_LIMIT_S = 600.0
_SOURCES = ("", "policies", "trainers")


def make_twin(folder: Path, tree: Path, requirements: Sequence[str] = ()) -> Path:
    """Return the interpreter of an environment in which `tree` is installed, made anew unless it is there already.

    Raises:
        subprocess.CalledProcessError: the requirements cannot be installed; pip has said why.
    """
    python = folder / "bin" / "python"
    told = "\n".join([sys.prefix, sys.version, str(tree), *requirements])
    complete = folder / "complete"
    if complete.exists() and complete.read_text(encoding="utf-8") == told:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    paths = [str(tree / source) for source in _SOURCES] + _packages()
    (own / "twin.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    if requirements:
        install(python, requirements)
    _copy_programs(folder / "bin")
    complete.write_text(told, encoding="utf-8")
    return python


def install(python: Path, requirements: Sequence[str]) -> None:
    """Install packages into another environment, in the versions that constraints.txt names.

    Raises:
        subprocess.CalledProcessError: they cannot be installed; pip has said why.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--ignore-installed", "--constraint", str(ROOT / "constraints.txt"), *requirements]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S, stdout=sys.stderr)


def _packages() -> list[str]:
    """Return where this interpreter finds installed packages."""
    return [path for path in sys.path if Path(path).name == "site-packages"]


def _copy_programs(folder: Path) -> None:
    """Give the twin the commands of this environment, run by its own interpreter."""
    here = Path(sys.executable).parent
    shebang = f"#!{folder / 'python'}\n"
    for program in sorted(here.iterdir()):
        target = folder / program.name
        if program.is_symlink() or not program.is_file() or target.exists():
            continue
        first, _, rest = program.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and os.fsencode(str(here)) in first:
            target.write_bytes(shebang.encode() + rest)
            target.chmod(0o755)
