"""Checks proofs as a stranger does: in a clean Debian with another Python, and without a network.

Usage: python benchmarks/runs/clean_check.py [--proof DIR] [--suite trixie] [--proofs 3] [--json]

Debootstrap makes a minimal Debian root; the wheel of this checkout is installed into a virtual environment there, with
the versions that pip finds. Then `gpuenergyd prove --check` runs in it without network, environment or home on proofs
that were written here: made-up trainings in virtual time, and DIR. Each must be recomputed byte for byte, and a copy
with one edited byte refused. Needs root, debootstrap, a Debian mirror and a package index; without them it fails with
the reason. Exits with 1 if a proof does not hold there or a tampered one does.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuenergyd_prove.folder import BLOCKS, VERDICT
from tests.plugins.prove.tampering import edited_energy, proved
from tests.plugins.prove.virtual_training import VirtualMeter, VirtualTraining

ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = "/usr/share/debootstrap/scripts/sid"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP = "/env/bin/pip install -q --disable-pip-version-check"
_VERSIONS = (
    "import cryptography, json, platform;"
    " print(json.dumps({'python': platform.python_version(), 'cryptography': cryptography.__version__,"
    " 'libc': ' '.join(platform.libc_ver())}))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--proof", type=Path, help="folder of a further proof")
    parser.add_argument("--suite", default="trixie", help="Debian suite")
    parser.add_argument("--proofs", type=int, default=3, help="proofs of made-up trainings")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("a clean Debian root needs root and debootstrap")
    with tempfile.TemporaryDirectory(prefix="gpuenergyd-clean-") as name:
        folder = Path(name)
        root = debian_root(folder, options.suite)
        proofs = made_up_proofs(root / "proofs", options.proofs)
        if options.proof is not None:
            proofs.append(Path(shutil.copytree(options.proof, root / "proofs" / "given")))
        figures = checked(root, options.suite, proofs)
    print(json.dumps(figures, indent=None if options.json else 1))
    is_met = figures["recomputed"] == figures["proofs"] and figures["tampered_refused"] == figures["proofs"]
    return 0 if is_met else 1


def debian_root(folder: Path, suite: str) -> Path:
    """Return a minimal Debian root with the wheel of this checkout in the virtual environment /env."""
    root, log = folder / "root", folder / "log"
    steps: list[Sequence[str]] = [
        ("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", suite, str(root), "", _SCRIPT),
        (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(root / "given"), str(ROOT)),
    ]
    for step in steps:
        with log.open("wb") as output:
            status = subprocess.run(step, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        if status != 0:
            sys.exit(f"{Path(step[0]).name} failed: {log.read_text(errors='replace').strip().splitlines()[-1]}")
    (wheel,) = (root / "given").glob("*.whl")
    shutil.copy("/etc/resolv.conf", root / "etc")
    if _CERTIFICATES.exists():
        shutil.copy(_CERTIFICATES, root / "etc/ssl/certs")
    install = f"python3 -m venv /env && {_PIP} '/given/{wheel.name}[prove]'"
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "http"))}
    done = inside(root, install, variables=kept, has_network=True)
    if done.returncode != 0:
        sys.exit(f"pip failed: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    return root


def inside(
    root: Path, command: str, *, variables: dict[str, str] | None = None, has_network: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a root, with no variables but those given, and without network unless it is needed."""
    spaces = ["--mount", "--pid", "--fork", *([] if has_network else ["--net"])]
    script = 'mount -t proc proc "$0/proc" && exec chroot "$0" /bin/sh -c "$1"'
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"} | (variables or {})
    return subprocess.run(
        ["unshare", *spaces, "sh", "-c", script, str(root), command],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip


def made_up_proofs(folder: Path, count: int) -> list[Path]:
    """Write proofs of made-up trainings, every second one beside a meter."""
    folder.mkdir()
    found = []
    for number in range(count):
        meter = VirtualMeter(lag_s=2.5, gain=1.05) if number % 2 else None
        proved(folder / str(number), VirtualTraining(seed=number, meter=meter), order_seed=number)
        found.append(folder / str(number))
    return found


def checked(root: Path, suite: str, proofs: Sequence[Path]) -> dict[str, Any]:
    """Check proofs and tampered copies of them in a root; return what held."""
    versions = inside(root, f'/env/bin/python -c "{_VERSIONS}"')
    recomputed = refused = 0
    reasons = []
    for proof in proofs:
        found = _check(root, proof)
        here = json.loads((proof / VERDICT).read_text())
        recomputed += found.get("holds") is True and found.get("verdict") == here
        reasons += found.get("problems", [])
        tampered = Path(shutil.copytree(proof, proof.with_name(f"{proof.name}-tampered")))
        edited_energy(tampered)
        assert (tampered / BLOCKS).read_bytes() != (proof / BLOCKS).read_bytes()
        refused += _check(root, tampered).get("holds") is False
    return {
        "root": f"Debian {suite}, minimal",
        "versions": json.loads(versions.stdout),
        "versions_here": {"python": sys.version.split()[0]},
        "proofs": len(proofs),
        "recomputed": recomputed,
        "tampered_refused": refused,
        "problems": reasons,
    }


def _check(root: Path, proof: Path) -> dict[str, Any]:
    done = inside(root, f"/env/bin/gpuenergyd prove --check /{proof.relative_to(root)} --json")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"problems": [(done.stderr or "no output").strip().splitlines()[-1]]}
    return found


if __name__ == "__main__":
    sys.exit(main())
