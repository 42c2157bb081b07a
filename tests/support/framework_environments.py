"""A virtual environment per training framework, built by `make frameworks`.

    python -m tests.support.framework_environments [NAME ...]

Each one shares the packages of the environment that builds it, torch and pytest above all, and adds only the framework
and its own dependencies: tens of megabytes instead of gigabytes. An environment that cannot be built is reported, and
the tests that need it skip.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.release.advisories import Pin, read_pins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".frameworks"
PACKAGES = {
    "lightning": ("lightning", "mlflow-skinny", "tensorboard", "wandb"),
    "huggingface": (
        "accelerate",
        "ipykernel",
        "matplotlib",
        "mlflow-skinny",
        "nbclient",
        "pandas",
        "tensorboard",
        "trackio",
        "transformers",
        "trl",
        "wandb",
    ),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron-core",),
    "perseus": ("zeus", "lowtime", "aiofiles", "httpx", "pandas"),
}
"""Packages of each environment; tests/trainers/test_<name>*.py run in it."""
_CONSTRAINTS = ("constraints.txt", "constraints-frameworks.txt")
"""A version in the second file replaces that in the first: some frameworks do not accept the newest."""
_BUILD_LIMIT_S = 300.0
_STAMP = "built-for"


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def is_built(name: str) -> bool:
    """Return whether an environment exists and was built for the current versions."""
    stamp = FOLDER / name / _STAMP
    return stamp.exists() and stamp.read_text(encoding="ascii") == _wanted(name)


def build(name: str) -> None:
    """Build one environment from scratch.

    Raises:
        subprocess.SubprocessError: pip failed or timed out; the folder is removed.
    """
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    # `addsitedir` rather than the bare path, because editable installs use .pth files.
    shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "shared.pth").write_text(shared, encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in _pins()), encoding="ascii")
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(constraints)]
    try:
        subprocess.run([*pip, *PACKAGES[name]], check=True, timeout=_BUILD_LIMIT_S)
    except subprocess.SubprocessError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _STAMP).write_text(_wanted(name), encoding="ascii")


def main(names: Sequence[str]) -> int:
    """Build missing environments; return 1 if one could not be built."""
    failed = []
    for name in names or PACKAGES:
        if is_built(name):
            continue
        try:
            build(name)
        except subprocess.SubprocessError as error:
            failed.append(name)
            sys.stderr.write(f"cannot build the environment for {name} ({type(error).__name__}): its tests skip\n")
    return 1 if failed else 0


def _pins() -> Iterable[Pin]:
    return {pin.name: pin for pin in read_pins(ROOT / constraints for constraints in _CONSTRAINTS)}.values()


def _wanted(name: str) -> str:
    digest = hashlib.sha256(repr((sys.version, sys.prefix, PACKAGES[name])).encode())
    for constraints in _CONSTRAINTS:
        digest.update((ROOT / constraints).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
