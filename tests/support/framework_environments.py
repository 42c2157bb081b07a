"""An environment for each training framework, since no two of them need the same: `make frameworks` builds them.

    python -m tests.support.framework_environments [NAME ...]

Each is a venv that sees everything of the environment that builds it, torch and pytest above all, and holds only the
framework and what it needs beside: tens of megabytes and seconds, instead of gigabytes and minutes. What cannot be
built in time is left out and said; the tests that need it skip.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".frameworks"
PACKAGES = {
    "lightning": ("lightning",),
    "huggingface": ("transformers", "accelerate"),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron-core",),
}
"""What an environment holds; tests/trainers/test_<name>.py is what runs in it."""
_CONSTRAINTS = ("constraints.txt", "constraints-frameworks.txt")
_BUILD_LIMIT_S = 300.0
_STAMP = "built-for"


def python_of(name: str) -> Path:
    """Return the interpreter of an environment."""
    return FOLDER / name / "bin" / "python"


def is_built(name: str) -> bool:
    """Return whether an environment is there and was built for the versions that are asked for now."""
    stamp = FOLDER / name / _STAMP
    return stamp.exists() and stamp.read_text(encoding="ascii") == _wanted(name)


def build(name: str) -> None:
    """Build one environment from nothing.

    Raises:
        subprocess.SubprocessError: pip failed or took too long; nothing is left behind.
    """
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    # `addsitedir` and not the bare path: editable installs stand in .pth files of their own.
    borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "borrowed.pth").write_text(borrowed, encoding="utf-8")
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for constraints in _CONSTRAINTS:
        pip += ["--constraint", str(ROOT / constraints)]
    try:
        subprocess.run([*pip, *PACKAGES[name]], check=True, timeout=_BUILD_LIMIT_S)
    except subprocess.SubprocessError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _STAMP).write_text(_wanted(name), encoding="ascii")


def main(names: Sequence[str]) -> int:
    """Build what is not built yet; return 1 when something could not be."""
    failed = []
    for name in names or PACKAGES:
        if is_built(name):
            continue
        try:
            build(name)
        except subprocess.SubprocessError as error:
            failed.append(name)
            sys.stderr.write(f"no environment for {name} ({type(error).__name__}): its tests skip\n")
    return 1 if failed else 0


def _wanted(name: str) -> str:
    digest = hashlib.sha256(repr((sys.version, sys.prefix, PACKAGES[name])).encode())
    for constraints in _CONSTRAINTS:
        digest.update((ROOT / constraints).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
