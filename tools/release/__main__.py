"""Build wheel, sdist, Debian package, RPM and bill of materials with checksums: `python -m tools.release [FOLDER]`."""

import shutil
import sys
from pathlib import Path

from tools.release.build import build_packages, commit_epoch_s, digest
from tools.release.contents import bill_of_materials
from tools.release.debian import build_debian_package
from tools.release.rpm import build_rpm_package


def main(out: Path) -> None:
    """Build all packages into an emptied folder."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    wheel, _ = build_packages(out)
    if shutil.which("dpkg-deb"):
        build_debian_package(wheel, out)
    else:
        print("dpkg-deb not found: skipping the Debian package", file=sys.stderr)  # noqa: T201  a command's answer
    if shutil.which("rpmbuild"):
        build_rpm_package(wheel, out)
    else:
        print("rpmbuild not found: skipping the RPM", file=sys.stderr)  # noqa: T201
    (out / "gpuenergyd.cdx.json").write_text(bill_of_materials(commit_epoch_s()), encoding="utf-8")
    lines = [f"{digest(path)}  {path.name}" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("dist"))
