"""What `make package` makes: installable everywhere, the same bytes each time, with all that is in it listed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.site.manual.manual_pages import manual_pages
from gpuenergyd import __version__
from gpuenergyd_install.installation import compile_command
from tools.release.audit import audit_offline, read_report
from tools.release.build import build_packages, digest
from tools.release.contents import bill_of_materials, components
from tools.release.debian import build_debian_package
from tools.release.rpm import build_rpm_package

ROOT = Path(__file__).resolve().parents[2]
EPOCH_S = "1790000000"
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Build and check wheel and sdist of this checkout, as of one instant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH_S)
        yield build_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def debian_package(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the Debian package from that wheel."""
    return build_debian_package(packages[0], tmp_path_factory.mktemp("debian"))


@pytest.mark.thorough
def test_the_same_sources_give_the_same_bytes(packages: tuple[Path, Path], tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        again = build_packages(tmp_path)
    finally:
        os.umask(umask)

    assert [digest(path) for path in again] == [digest(path) for path in packages]


@pytest.mark.thorough
def test_the_sdist_holds_what_a_build_needs_and_nothing_of_this_machine(packages: tuple[Path, Path]) -> None:
    with tarfile.open(packages[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "LICENSE", "README.md", "gpuenergyd/cli/app.py", "systemd/gpuenergyd.service"} <= names
    assert [name for name in names if name.startswith((".venv", ".git/", "dist/", "build/")) or ".pyc" in name] == []


@pytest.mark.thorough
def test_the_wheel_installs_without_dependencies_and_a_program_runs_with_it(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    """`tools/ci/pythons` does this, and more, on every supported Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=300)
    own = str(tmp_path / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", own, "install", "-q", "--no-index", "--no-compile"]
    subprocess.run([*pip, str(packages[0])], check=True, timeout=300)
    program = (
        "import gpuenergyd, gpuenergyd_trainers\n"
        "with gpuenergyd.job('j') as job:\n"
        "    with job.iteration():\n"
        "        print(gpuenergyd.__version__)\n"
    )

    ran = subprocess.run([own, "-I", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{__version__}\n"


@needs_dpkg
@pytest.mark.thorough
def test_the_debian_package_is_the_same_bytes_each_time(
    packages: tuple[Path, Path], debian_package: Path, tmp_path: Path
) -> None:
    assert digest(build_debian_package(packages[0], tmp_path)) == digest(debian_package)


@needs_dpkg
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("lintian") is None, reason="no lintian here")
def test_lintian_finds_no_error(debian_package: Path) -> None:
    found = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", str(debian_package)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert [line for line in found.stdout.splitlines() if line.startswith("E:")] == [], found.stdout
    assert found.returncode == 0, found.stderr


@pytest.mark.thorough
@needs_dpkg
def test_the_debian_package_holds_units_settings_pages_and_completions(debian_package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", str(debian_package), str(tmp_path)], check=True)

    units = tmp_path / "usr/lib/systemd/system"
    assert {path.name for path in units.iterdir()} == {
        path.name for pattern in ("*.service", "*.socket") for path in (ROOT / "systemd").glob(pattern)
    }
    assert all("/opt/" not in path.read_text(encoding="utf-8") for path in units.iterdir())
    assert (tmp_path / "etc/gpuenergyd/config.toml").is_file()
    assert {path.name for path in (tmp_path / "usr/share/man").rglob("*.gz")} == {f"{n}.gz" for n in manual_pages()}
    for completion in ("bash-completion/completions/gpuenergyd", "zsh/vendor-completions/_gpuenergyd"):
        assert "gpuenergyd" in (tmp_path / "usr/share" / completion).read_text(encoding="utf-8")


@pytest.mark.thorough
@needs_dpkg
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: dpkg gives files their owners")
@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd-sysusers here")
def test_the_debian_package_installs_makes_the_group_and_purges(debian_package: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "var/lib/dpkg/updates").mkdir(parents=True)
    (root / "var/lib/dpkg/info").mkdir()
    (root / "var/lib/dpkg/status").touch()
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n", encoding="utf-8")
    (root / "etc/group").write_text("root:x:0:\n", encoding="utf-8")
    # Its dependencies are Debian's business, not this root's.
    dpkg = ["dpkg", f"--root={root}", "--force-depends", "--force-script-chrootless"]

    installed = subprocess.run([*dpkg, "--install", str(debian_package)], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    groups = (root / "etc/group").read_text(encoding="utf-8")
    program = [str(root / "usr/bin/gpuenergyd"), "--version"]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages{os.pathsep}{os.pathsep.join(sys.path)}",
    }
    version = subprocess.run([sys.executable, *program], env=environ, capture_output=True, text=True, check=False)
    purged = subprocess.run([*dpkg, "--purge", "gpuenergyd"], capture_output=True, text=True, check=False)

    assert re.search(r"^gpuenergy:", groups, flags=re.MULTILINE)
    assert version.stdout.startswith(f"gpuenergyd {__version__}\n"), version.stderr
    assert purged.returncode == 0, purged.stderr
    assert not (root / "usr/bin/gpuenergyd").exists()
    assert not (root / "etc/gpuenergyd/config.toml").exists()


@pytest.mark.thorough
@needs_dpkg
@pytest.mark.parametrize(("status_of_compiling", "complaint"), [(0, ""), (1, "the first plan compiles the planner\n")])
def test_the_debian_package_compiles_the_planner_for_the_policy_host_once_its_user_exists(
    debian_package: Path, tmp_path: Path, status_of_compiling: int, complaint: str
) -> None:
    subprocess.run(["dpkg-deb", "--control", str(debian_package), str(tmp_path / "control")], check=True)
    for name, status in (("systemd-sysusers", 0), ("systemd-tmpfiles", 0), ("runuser", status_of_compiling)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/log\nexit {status}\n')
        program.chmod(0o755)

    done = subprocess.run(
        ["/bin/sh", str(tmp_path / "control" / "postinst"), "configure"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    ran = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in ran][:3] == ["systemd-sysusers", "systemd-tmpfiles", "runuser"]
    assert ran[2] == " ".join(compile_command("/usr/bin/python3"))
    assert done.stderr.endswith(complaint)


@pytest.mark.thorough
@needs_dpkg
@pytest.mark.parametrize(("upgraded_from", "is_reported"), [("", False), ("0.3.0-1", True), ("0.9.0-1", False)])
def test_the_debian_package_reports_at_an_upgrade_from_0_3_that_the_daemon_only_observes(
    debian_package: Path, tmp_path: Path, upgraded_from: str, *, is_reported: bool
) -> None:
    subprocess.run(["dpkg-deb", "--control", str(debian_package), str(tmp_path / "control")], check=True)
    for name in ("systemd-sysusers", "systemd-tmpfiles", "runuser"):
        (tmp_path / name).symlink_to("/bin/true")
    (tmp_path / "dpkg").symlink_to(shutil.which("dpkg") or "")

    done = subprocess.run(
        ["/bin/sh", str(tmp_path / "control" / "postinst"), "configure", upgraded_from],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert ("the daemon observes unless /etc/gpuenergyd/config.toml sets mode = control" in done.stderr) is is_reported


RPMLINT = """
Filters = ["no-signature", "invalid-license", "manpage-not-compressed", "no-manual-page-for-binary"]
"""
"""The package is not signed; Debian's rpmlint expects licences of old names and manual pages in bzip2."""


@pytest.fixture(scope="module")
def rpm_package(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the RPM from that wheel."""
    if shutil.which("rpmbuild") is None:
        pytest.skip("no rpmbuild here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH_S)
        return build_rpm_package(packages[0], tmp_path_factory.mktemp("rpm"))


@pytest.mark.thorough
def test_the_rpm_is_the_same_bytes_each_time(
    packages: tuple[Path, Path], rpm_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH_S)

    assert digest(build_rpm_package(packages[0], tmp_path)) == digest(rpm_package)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("rpmlint") is None, reason="no rpmlint here")
def test_rpmlint_finds_no_error(rpm_package: Path, tmp_path: Path) -> None:
    config = tmp_path / "rpmlint.toml"
    config.write_text(RPMLINT, encoding="utf-8")

    found = subprocess.run(
        ["rpmlint", "--config", str(config), str(rpm_package)], capture_output=True, text=True, check=False, timeout=300
    )

    assert [line for line in found.stdout.splitlines() if ": E: " in line] == [], found.stdout
    assert "0 errors" in found.stdout


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: rpm gives files their owners")
def test_the_rpm_installs_the_files_of_the_debian_package_and_is_removed(
    rpm_package: Path, debian_package: Path, tmp_path: Path
) -> None:
    listed = subprocess.run(["dpkg-deb", "--contents", str(debian_package)], capture_output=True, text=True, check=True)
    of_debian = {line.split()[5][1:] for line in listed.stdout.splitlines() if not line.endswith("/")}
    root = tmp_path / "root"
    rpm = ["rpm", "--root", str(root), "--dbpath", "/rpm"]

    subprocess.run([*rpm, "--install", "--nodeps", "--noscripts", str(rpm_package)], check=True, timeout=300)
    installed = {f"/{path.relative_to(root)}" for path in root.rglob("*") if path.is_file()}
    subprocess.run([*rpm, "--erase", "--nodeps", "--noscripts", "gpuenergyd"], check=True, timeout=300)

    def shared(names: set[str]) -> set[str]:
        """Return paths without those of documents and completions, in the folder of Debian's Python packages."""
        of_python = {re.sub("/python3[^/]*/site-packages/", "/python3/dist-packages/", name) for name in names}
        return {name for name in of_python if not name.startswith(("/usr/share/doc/", "/usr/share/zsh/", "/rpm/"))}

    assert shared(installed) - shared(of_debian) == {"/usr/share/licenses/gpuenergyd/LICENSE"}
    assert shared(of_debian) - shared(installed) == set()
    assert {path.name for path in root.rglob("*") if path.is_file() and "rpm" not in path.parts} == set()


def test_the_bill_of_materials_lists_every_dependency_with_version_and_licence() -> None:
    document = json.loads(bill_of_materials(int(EPOCH_S)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    direct = {canonicalize_name(Requirement(t).name) for e in ("daemon", "trainers") for t in extras[e]}

    listed = {component["name"]: component for component in document["components"]}
    assert direct - set(listed) == set()
    assert [name for name, component in listed.items() if not component.get("licenses")] == []
    assert all(component["purl"] == f"pkg:pypi/{name}@{component['version']}" for name, component in listed.items())
    references = {component["bom-ref"] for component in document["components"]}
    assert {ref for entry in document["dependencies"] for ref in entry["dependsOn"]} <= references
    assert bill_of_materials(int(EPOCH_S)) == bill_of_materials(int(EPOCH_S))
    assert len({component.name for component in components()}) == len(listed)


def test_an_audit_succeeds_only_if_every_package_was_checked_and_none_is_vulnerable() -> None:
    clean = {"name": "a", "version": "1", "vulns": []}
    hole = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
    unknown = {"name": "c", "skip_reason": "not found"}

    audits = [read_report({"dependencies": members}) for members in ([clean], [clean, unknown], [hole, unknown], [])]

    assert [one.exit_status for one in audits] == [0, 3, 1, 3]
    assert str(audits[0]) == "checked 1 packages: 0 known vulnerabilities"
    assert "not checked: 1 packages (c)" in str(audits[1])
    assert str(audits[2]).startswith("vulnerable: b 2: PYSEC-1, fixed in 2.1\n")


ADVISORY = """\
id: PYSEC-2026-1
modified: {modified}
affected:
- package: {{ecosystem: PyPI, name: Some_Package}}
  ranges:
  - type: GIT
    events: [{{introduced: "0"}}]
  - type: ECOSYSTEM
    events: [{{introduced: "1.2"}}, {{fixed: "1.4"}}, {{introduced: "2.0"}}, {{last_affected: "2.1"}}]
  versions: ["0.9"]
"""


@pytest.mark.parametrize(
    ("version", "num_found"), [("0.9", 1), ("1.0", 0), ("1.2", 1), ("1.3.9", 1), ("1.4", 0), ("2.1", 1), ("2.2", 0)]
)
def test_a_copy_of_the_advisory_database_lists_vulnerable_versions(
    version: str, num_found: int, tmp_path: Path
) -> None:
    lock = tmp_path / "constraints.txt"
    lock.write_text(f"# locked\nsome.package=={version}\nother==1.3\n")
    folder = tmp_path / "vulns" / "some-package"
    folder.mkdir(parents=True)
    for day, more in (("2026-05-06", ""), ("2026-01-02", "withdrawn: 2026-01-03T00:00:00Z\n")):
        (folder / f"{day}.yaml").write_text(ADVISORY.format(modified=f"{day}T01:02:03Z") + more)

    found = audit_offline(tmp_path, (lock,))

    assert found.exit_status == num_found
    assert str(found).endswith(f"checked 2 packages: {num_found} known vulnerabilities, as of 2026-05-06")
    assert (f"vulnerable: some-package {version}: PYSEC-2026-1, fixed in 1.4\n" in str(found)) == bool(num_found)


def test_a_folder_that_is_not_a_copy_of_the_database_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is not a copy of the PyPA's advisory database"):
        audit_offline(tmp_path, ())
