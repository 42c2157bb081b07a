"""Creates a second virtual environment with the packages of the current one and another source tree.

Tools that change how everything runs do not belong into `.venv`: numba imports coverage wherever it is installed, for
example. An environment of its own is needed because daemons and trainers started with `python -I` ignore PYTHONPATH.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from docs.site.house_map import ROOT, SOURCES

INSTALL_LIMIT_S = 600.0


def make_twin(folder: Path, tree: Path, requirements: Sequence[str] = ()) -> Path:
    """Return the interpreter of an environment in which `tree` is installed; create it unless it exists.

    Raises:
        subprocess.CalledProcessError: pip cannot install the requirements.
    """
    python = folder / "bin" / "python"
    description = "\n".join([sys.prefix, sys.version, str(tree), *requirements])
    complete = folder / "complete"
    if complete.exists() and complete.read_text(encoding="utf-8") == description:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    paths = [str(tree / source.relative_to(ROOT)) for source in SOURCES] + _packages()
    (own / "twin.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    if requirements:
        install(python, requirements)
    _copy_programs(folder / "bin")
    complete.write_text(description, encoding="utf-8")
    return python


def install(python: Path, requirements: Sequence[str]) -> None:
    """Install packages into another environment, in the versions of constraints.txt.

    Raises:
        subprocess.CalledProcessError: pip cannot install them.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--ignore-installed", "--constraint", str(ROOT / "constraints.txt"), *requirements]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S, stdout=sys.stderr)


def _packages() -> list[str]:
    """Return the site-packages folders of this interpreter."""
    return [path for path in sys.path if Path(path).name == "site-packages"]


def _copy_programs(folder: Path) -> None:
    """Copy this environment's commands, run by the new interpreter."""
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
