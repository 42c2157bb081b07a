"""`gpuenergyd install` and `uninstall` write and remove files, and keep edited ones."""

import json
import os
import re
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.daemon.settings import Mode, load_settings
from gpuenergyd_install.installation import _signed, compile_command, files_to_install

PYTHON = "/opt/elsewhere/bin/python"
UNITS = "etc/systemd/system"


def installed(root: Path) -> dict[str, str]:
    """Return every file below a folder."""
    return {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in sorted(root.rglob("*")) if p.is_file()}


def install(root: Path, *options: str) -> int:
    """Install below a folder."""
    return run(["install", "--root", str(root), "--python", PYTHON, *options])


def uninstall(root: Path, *options: str) -> int:
    """Uninstall below a folder."""
    return run(["uninstall", "--root", str(root), *options])


def test_everything_a_host_needs_is_written_with_its_own_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path) == 0

    files, output = installed(tmp_path), capsys.readouterr().out
    services = [name for name in files if name.endswith(".service")]
    assert len(services) == 6
    assert {name for name in files if not name.startswith(UNITS)} == {
        "etc/sysusers.d/gpuenergyd.conf",
        "etc/tmpfiles.d/gpuenergyd.conf",
        "etc/gpuenergyd/config.toml",
    }
    assert all(f"ExecStart={PYTHON} -I -m gpuenergyd" in files[name] for name in services)
    assert all(f"write: {tmp_path / name}" in output for name in files)


def test_the_installed_configuration_equals_the_defaults_but_sets_the_mode(tmp_path: Path) -> None:
    install(tmp_path)

    settings = load_settings(tmp_path / "etc/gpuenergyd/config.toml")
    assert settings == load_settings()
    assert (settings.mode, settings.model_fields_set) == (Mode.OBSERVE, {"mode"})


def test_a_second_run_changes_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path)
    before = installed(tmp_path)
    capsys.readouterr()

    assert install(tmp_path) == 0

    assert installed(tmp_path) == before
    assert "nothing to change" in capsys.readouterr().out


def test_another_interpreter_replaces_unedited_units(tmp_path: Path) -> None:
    install(tmp_path)

    assert run(["install", "--root", str(tmp_path), "--python", "/opt/new/bin/python"]) == 0

    assert "/opt/new/bin/python" in installed(tmp_path)[f"{UNITS}/gpuenergyd.service"]


def test_edited_units_are_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path)
    unit, config = tmp_path / UNITS / "gpuenergyd.service", tmp_path / "etc/gpuenergyd/config.toml"
    for path in (unit, config):
        path.write_text(path.read_text() + "# mine\n")

    install(tmp_path)
    kept = capsys.readouterr().out
    install(tmp_path, "--force")

    assert f"keep, edited: {unit}" in kept
    assert "# mine" not in unit.read_text()
    assert "# mine" in config.read_text()


def test_a_dry_run_writes_and_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install(tmp_path, "--dry-run") == 0
    assert installed(tmp_path) == {}
    assert "dry run, nothing was changed; steps:" in capsys.readouterr().out

    install(tmp_path)
    before = installed(tmp_path)
    assert uninstall(tmp_path, "--dry-run") == 0
    assert installed(tmp_path) == before


def test_uninstalling_removes_the_compiled_planner_and_leaves_only_the_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)
    history = tmp_path / "var/lib/gpuenergyd/history.sqlite3"
    history.parent.mkdir(parents=True)
    history.write_text("precious")
    compiled = tmp_path / "var/cache/gpuenergyd/kernels-1/kernel.nbc"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("code")

    assert uninstall(tmp_path) == 0

    assert installed(tmp_path) == {"var/lib/gpuenergyd/history.sqlite3": "precious"}
    assert f"keep: {history.parent}" in capsys.readouterr().out
    assert uninstall(tmp_path, "--history") == 0
    assert installed(tmp_path) == {}


def test_an_edited_configuration_is_removed_only_on_request(tmp_path: Path) -> None:
    install(tmp_path)
    config = tmp_path / "etc/gpuenergyd/config.toml"
    config.write_text('mode = "observe"\n')

    uninstall(tmp_path, "--force")
    assert installed(tmp_path) == {"etc/gpuenergyd/config.toml": 'mode = "observe"\n'}

    uninstall(tmp_path, "--config")
    assert not config.parent.exists()


def test_a_link_at_the_path_of_a_unit_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    root = tmp_path / "root"
    (root / UNITS).mkdir(parents=True)
    (root / UNITS / "gpuenergyd.service").symlink_to(precious)

    install(root, "--force")
    uninstall(root)

    assert precious.read_text() == "data"


def test_json_lists_files_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, "--json")

    reported = json.loads(capsys.readouterr().out)
    assert {file["action"] for file in reported["files"]} == {"write"}
    assert (reported["commands"], reported["next_command"], reported["is_dry_run"]) == ([], None, False)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--root", "/no/such/folder"], "--root /no/such/folder: no such folder"),
        (["--dry-run", "--python", "bin/python"], "--python bin/python: must be an absolute path"),
        (["--dry-run", "--python", "/home/me/venv/bin/python"], "/home/me/venv/bin/python is hidden from"),
    ],
)
def test_invalid_options_are_one_line_and_a_usage_error(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["install", *options]) == 2

    output = capsys.readouterr().err
    assert complaint in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_without_root_nothing_changes_and_the_error_names_sudo(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Becoming another user for real would take the interpreter away where it lies in root's home.
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    options = ["--python", PYTHON] if command == "install" else []

    assert run([command, *options]) == 1

    output = capsys.readouterr().err
    assert f"{command} needs root, not uid {os.geteuid()}: `sudo gpuenergyd {command}`" in output
    assert output.count("\n") == 1


def test_the_cache_that_the_policy_host_uses_is_created_and_filled() -> None:
    files = {str(path): text for path, text in files_to_install(Path(PYTHON)).items()}
    unit = files[f"{UNITS}/gpuenergyd-policy@.service"]
    (environment,) = re.findall(r"^Environment=.*?(NUMBA_CACHE_DIR=\S+)", unit, re.MULTILINE)
    (user,) = re.findall(r"^User=(\S+)", unit, re.MULTILINE)
    (start,) = re.findall(r"^ExecStart=(\S+) -I ", unit, re.MULTILINE)

    command = compile_command(Path(PYTHON))

    assert command[:8] == ("runuser", "-u", user, "--", "env", "--chdir=/", environment, start)
    assert f"d {environment.partition('=')[2]}  0755 {user} {user} -" in files["etc/tmpfiles.d/gpuenergyd.conf"]


@pytest.fixture
def as_root_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let commands write below a folder instead of this host, as root, with stand-ins for the host's programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemd-sysusers", "systemd-tmpfiles", "systemctl", "runuser"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/log\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("gpuenergyd_install.command._is_this_host", lambda _root: True)
    return tmp_path


def test_install_compiles_the_planner_after_users_and_folders_exist(
    as_root_on_this_host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(as_root_on_this_host) == 0

    commands = (as_root_on_this_host / "log").read_text().splitlines()
    assert [line.split()[0] for line in commands] == ["systemd-sysusers", "systemd-tmpfiles", "systemctl", "runuser"]
    assert commands[-1] == " ".join(compile_command(Path(PYTHON)))
    assert "compiling the planner, about 20 s" in capsys.readouterr().err


def test_a_planner_that_cannot_be_compiled_ahead_is_a_warning(
    as_root_on_this_host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (as_root_on_this_host / "bin" / "runuser").write_text("#!/bin/sh\necho no such user >&2\nexit 1\n")

    assert install(as_root_on_this_host) == 0
    assert "failed: no such user; the first plan compiles the planner instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "output"),
    [
        (None, "mode: observe; the daemon measures and changes no GPU"),
        ('mode = "observe"\n', "mode: observe; the daemon measures and changes no GPU"),
        ('mode = "control"\n', "mode: control; the daemon sets clocks"),
        (
            'policy = "cost"\n',
            "set none, with which the daemon set clocks up to version 0.3; from now on it only observes",
        ),
        ('mode = "fast"\n', "the configuration is invalid"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_install_reports_whether_clocks_will_be_set_and_how_to_change_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str | None, output: str, options: tuple[str, ...]
) -> None:
    config = tmp_path / "etc/gpuenergyd/config.toml"
    if found is not None:
        config.parent.mkdir(parents=True)
        config.write_text(found)

    assert install(tmp_path, *options) == 0

    line = capsys.readouterr().out.splitlines()[-1]
    assert output in line
    assert ('set mode = "control" in /etc/gpuenergyd/config.toml' in line) is (found is None or "observe" in output)
    assert found is None or config.read_text() == found


def test_the_unedited_configuration_of_version_0_3_is_replaced_and_the_change_of_mode_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)
    config = tmp_path / "etc/gpuenergyd/config.toml"
    _, _, text = config.read_text().partition("\n")
    config.write_text(_signed(text.replace('mode = "observe"', '# mode = "control"')))
    capsys.readouterr()

    assert install(tmp_path) == 0

    assert load_settings(config).mode_note is None
    assert "from now on it only observes" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("written", "output"),
    [
        ("", "no source configured"),
        ('carbon_zone = "GB"\n', "zone GB"),
        ('carbon_zone = "DE"\ncarbon_source = "electricity-maps"\n', "queries electricity-maps for zone DE"),
        ("carbon_zone = 7\n", "the configuration is invalid"),
    ],
)
def test_install_reports_whether_a_carbon_source_is_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, output: str
) -> None:
    assert install(tmp_path) == 0
    with (tmp_path / "etc/gpuenergyd/config.toml").open("a") as config:
        config.write(written)
    capsys.readouterr()

    assert install(tmp_path) == 0

    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("carbon: ")]
    assert output in line
