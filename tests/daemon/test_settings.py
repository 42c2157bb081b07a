"""Settings: defaults, file, environment and flags; errors are reported with their place."""

import re
import tomllib
from pathlib import Path

import pytest

from gpuenergyd.daemon.settings import DEFAULT_CONFIG_PATH, Mode, Settings, load_settings
from gpuenergyd.daemon.settings_sources import setting_values
from gpuenergyd.errors import UsageError

CARBON_NOT_SET = (
    *("zone", "price_path", "source", "key_path", "base_url", "kind", "factor", "fixed_g_per_kwh"),
    "replay_from",
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpuenergyd.daemon.settings.SYSTEM_CONFIG_PATH", tmp_path / "no-system-config.toml")
    for key in Settings.model_fields:
        monkeypatch.delenv(f"GPUENERGYD_{key.upper()}", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_every_setting_has_a_default_and_sockets_are_in_the_runtime_directory(tmp_path: Path) -> None:
    settings = load_settings(runtime_dir=tmp_path / "run", state_dir=tmp_path / "state")

    assert settings.mode is Mode.OBSERVE
    assert settings.driver == "nvml"
    assert (settings.policy, settings.max_slowdown_ratio) == ("bubble-aware", 0.0)
    assert (settings.warmup_iterations, settings.baseline_iterations) == (2, 10)
    assert settings.socket_path == tmp_path / "run" / "gpuenergyd.sock"
    assert settings.database_url == f"sqlite:///{tmp_path / 'state' / 'history.sqlite3'}"
    paths = {settings.socket_path, settings.clock_socket_path, settings.worker_link_path, settings.journal_path}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {tmp_path / "run"}


@pytest.mark.parametrize(
    ("driver", "given", "mode", "is_noted"),
    [
        ("nvml", {}, Mode.OBSERVE, True),
        ("command", {}, Mode.OBSERVE, True),
        ("simulated", {}, Mode.CONTROL, False),
        ("nvml", {"mode": "observe"}, Mode.OBSERVE, False),
        ("command", {"mode": "control"}, Mode.CONTROL, False),
        ("simulated", {"mode": "observe"}, Mode.OBSERVE, False),
    ],
)
def test_only_simulated_gpus_are_controlled_unasked_and_an_unset_mode_is_noted(
    driver: str, given: dict[str, str], mode: Mode, *, is_noted: bool
) -> None:
    settings = load_settings(driver=driver, world_path="world", **given)

    assert (settings.mode, settings.mode_note is not None) == (mode, is_noted)


@pytest.mark.parametrize("place", ["file", "environment"])
def test_a_mode_of_the_file_or_the_environment_is_a_set_mode(
    config: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config.write_text('mode = "observe"\n' if place == "file" else "")
    monkeypatch.setenv("GPUENERGYD_MODE", "" if place == "file" else "observe")

    assert load_settings(config).mode_note is None


def test_paths_are_absolute_since_clients_run_in_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    settings = load_settings(runtime_dir=Path("run"), state_dir="state", world_path="world")

    assert settings.clock_socket_path == tmp_path / "run" / "clock.sock"
    assert settings.database_url == f"sqlite:///{tmp_path / 'state' / 'history.sqlite3'}"
    assert settings.world_path == tmp_path / "world"


@pytest.mark.parametrize("url", ["mysql://gpu:secret@db/history", "mysql+pymysql://gpu:secret@db/history", "postgres://db/history",
                                 "sqlite://history.sqlite3"])  # fmt: skip
def test_an_unsupported_database_is_refused_with_the_valid_kinds(url: str, config: Path) -> None:
    config.write_text(f'database_url = "{url}"\n')

    with pytest.raises(
        UsageError, match=r"is not supported; valid are sqlite:////ABSOLUTE/PATH and postgresql://"
    ) as refused:
        load_settings(config)

    assert "database_url" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["sqlite:////var/lib/history.sqlite3", "postgresql://gpu@db/history", "postgresql+psycopg://db/history"]
)
def test_sqlite_and_postgresql_are_accepted(url: str, config: Path) -> None:
    config.write_text(f'database_url = "{url}"\n')

    assert load_settings(config).database_url == url


def test_a_user_without_root_gets_private_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    with_xdg = load_settings()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    without_xdg = load_settings()

    assert with_xdg.runtime_dir == tmp_path / "run" / "gpuenergyd"
    assert with_xdg.state_dir == tmp_path / "state" / "gpuenergyd"
    assert without_xdg.runtime_dir.name == "gpuenergyd-4711"


def test_flags_override_the_environment_which_overrides_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('policy = "from-file"\nbaseline_iterations = 20\nmax_slowdown_ratio = 0.1\n')
    monkeypatch.setenv("GPUENERGYD_BASELINE_ITERATIONS", "30")
    monkeypatch.setenv("GPUENERGYD_MAX_SLOWDOWN_RATIO", "0.2")

    settings = load_settings(config, max_slowdown_ratio=0.3, mode=None)

    assert settings.policy == "from-file"
    assert settings.baseline_iterations == 30
    assert settings.max_slowdown_ratio == 0.3


def test_environment_variables_of_the_client_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUENERGYD_SOMETHING_OF_THE_CLIENT", "1")

    assert load_settings().policy == "bubble-aware"


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('polcy = "x"', r"config\.toml: unknown setting 'polcy'; did you mean 'policy'\?$"),
        ("colour = 1", r"config\.toml: unknown setting 'colour'; valid: .*baseline_iterations.*policy"),
        ('levers = "clocks"', r"config\.toml: levers = 'clocks': must be a list$"),
        ("baseline_iterations = 2.5", "baseline_iterations = 2.5: must be a whole number$"),
        ('sample_period_s = "abc"', "sample_period_s = 'abc': must be a number$"),
        ('carbon_zone = ""', "carbon_zone = '': must match pattern"),
        ('carbon_replay_from = "xx"', "carbon_replay_from = 'xx': must be a time such as 2026-01-31T08:00:00Z$"),
        ("power_budget_w = -4", "power_budget_w = -4: must be greater than 0$"),
        ("max_slowdown_ratio = -0.1", r"config\.toml: max_slowdown_ratio = -0\.1: must be from 0 to 1"),
        ("max_slowdown_ratio = 1.5", r"config\.toml: max_slowdown_ratio = 1\.5: must be from 0 to 1"),
        ("pue = 0.9", r"config\.toml: pue = 0\.9: must be from 1 to 5"),
        ("pue = 120", r"config\.toml: pue = 120: must be from 1 to 5"),
        ("max_slowdown_ratio = nan", r"config\.toml: max_slowdown_ratio = nan: .*finite"),
        ('driver = "amd"', r"config\.toml: driver = 'amd': must be one of command, nvml, simulated"),
        ('sample_period_s = "fast"', r"config\.toml: sample_period_s = 'fast'"),
        ("policy = \n", r"config\.toml: Invalid value .*line 1"),
        ('driver = "simulated"', r"driver = 'simulated' requires world_path"),
    ],
)
def test_an_error_in_the_file_is_reported_in_one_line_with_its_setting(config: Path, text: str, message: str) -> None:
    config.write_text(text)

    with pytest.raises(UsageError, match=message) as caught:
        load_settings(config)

    assert "\n" not in str(caught.value)


def test_an_invalid_value_is_reported_with_its_variable_or_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--baseline-iterations = 0: "):
        load_settings(baseline_iterations=0)

    with pytest.raises(UsageError, match=r"--max-slowdown = 2: must be from 0 to 1"):
        load_settings(max_slowdown_ratio=2)

    monkeypatch.setenv("GPUENERGYD_BASELINE_ITERATIONS", "many")
    with pytest.raises(UsageError, match=r"GPUENERGYD_BASELINE_ITERATIONS = 'many': "):
        load_settings()


def test_a_missing_file_is_an_error_if_it_was_requested(config: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*config\.toml: No such file"):
        load_settings(config)


def test_the_commented_file_contains_exactly_the_settings() -> None:
    text = DEFAULT_CONFIG_PATH.read_text(encoding="utf-8")

    named = set(re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE))
    uncommented = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))

    assert named == set(Settings.model_fields)
    assert set(uncommented) == named


def test_the_commented_file_shows_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    text = DEFAULT_CONFIG_PATH.read_text(encoding="utf-8")
    shown = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    not_set_by_default = {"world_path", "socket_group", "policy_memory_limit_bytes", "host_name"}
    not_set_by_default |= {"power_budget_w", "power_schedule_path", "power_ramp_w_per_s"}
    not_set_by_default |= {f"carbon_{name}" for name in CARBON_NOT_SET}
    filled = tmp_path / "filled.toml"
    filled.write_text(
        "\n".join(
            line.removeprefix("# ")
            for line in text.splitlines()
            if (match := re.match(r"(?:# )?(\w+) = ", line)) and match[1] not in not_set_by_default
        )
    )

    assert load_settings(filled) == load_settings()
    assert set(shown) - not_set_by_default == set(Settings.model_fields) - not_set_by_default


@pytest.mark.fault(43)
def test_a_world_writable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('mode = "observe"\n')
    path.chmod(0o666)

    with pytest.raises(UsageError, match="refusing to load a world-writable"):
        load_settings(path)


def test_policy_tables_are_options_and_their_default_is_the_policy(config: Path) -> None:
    config.write_text(
        'mode = "observe"\n[policy]\ndefault = "cost"\n[policy.cost]\neta = 0.7\n[policy.own]\nfast = true\n'
    )

    settings = load_settings(config)

    assert settings.policy == "cost"
    assert settings.policy_options == {"cost": {"eta": 0.7}, "own": {"fast": True}}


def test_policy_options_need_no_default_policy(config: Path) -> None:
    config.write_text("[policy.cost]\neta = 1\n")

    assert (load_settings(config).policy, load_settings(config).policy_options) == (
        "bubble-aware",
        {"cost": {"eta": 1}},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[policy]\nname = "cost"\n', "policy.name: valid are policy.default and tables"),
        ("policy_options = {}\n[policy.cost]\neta = 1\n", r"give policy_options or tables \[policy.NAME\], not both"),
        ('[policy.cost]\neta = "1,2"\n', r"\[policy.cost\] eta = '1,2': must be a name, and a value without commas"),
        ("[policy.cost]\neta = [1]\n", "policy_options"),
        ("[policy]\ndefault = 7\n", "policy = 7: "),
    ],
)
def test_malformed_policy_tables_are_refused(config: Path, text: str, message: str) -> None:
    config.write_text(text)

    with pytest.raises(UsageError, match=message):
        load_settings(config)


def test_each_setting_says_where_it_comes_from(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('database_url = "postgresql://me:secret@db/history"\nwarmup_iterations = 2\n')
    monkeypatch.setenv("GPUENERGYD_BASELINE_ITERATIONS", "7")

    found = {one.key: one for one in setting_values(config)}

    assert list(found) == list(Settings.model_fields)
    assert (found["warmup_iterations"].source, found["warmup_iterations"].default) == (f"file {config}", 2)
    assert found["database_url"].value == "postgresql://me:***@db/history"
    assert found["baseline_iterations"].source == "environment GPUENERGYD_BASELINE_ITERATIONS"
    assert (found["baseline_iterations"].value, found["baseline_iterations"].default) == (7, 10)
    assert {one.source for key, one in found.items() if key.startswith("carbon")} == {"default"}
    assert all(one.value == one.default for one in found.values() if one.source == "default")


def test_an_unknown_key_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="no setting 'policies'; valid: admin_groups, "):
        setting_values(None, ["policies"])


def test_a_misspelled_variable_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("GPUENERGYD_SAMPEL_PERIOD_S", "0.1")

    with pytest.raises(UsageError) as refused:
        load_settings(tmp_path / "config.toml")

    assert str(refused.value) == (
        "GPUENERGYD_SAMPEL_PERIOD_S: no such setting; did you mean GPUENERGYD_SAMPLE_PERIOD_S?"
    )


def test_variables_of_programs_and_plugins_are_no_misspelled_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/environment-variables.md").read_text()
    names = {*re.findall(r"GPUENERGYD_[A-Z_]+", page), "GPUENERGYD_DEBUG", "GPUENERGYD_MY_PLUGIN"}
    (tmp_path / "config.toml").touch()
    for name in names:
        monkeypatch.setenv(name, "1")

    assert load_settings(tmp_path / "config.toml").driver == "nvml"  # nothing is refused
    assert len(names) > 10


def test_a_list_in_a_variable_must_be_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("GPUENERGYD_LEVERS", "clocks")

    with pytest.raises(UsageError, match=r"^GPUENERGYD_LEVERS = 'clocks': must be JSON, e\.g\. "):
        load_settings(tmp_path / "config.toml")


def test_a_table_of_an_installed_service_holds_its_options(config: Path) -> None:
    config.write_text('mode = "observe"\n[idle]\nenabled = true\nafter_s = 60\n')
    assert load_settings(config).service_options == {"idle": {"enabled": True, "after_s": 60}}
    config.write_text("service_options = 5\n[idle]\nenabled = true\n")
    with pytest.raises(UsageError, match="service_options = 5: must be a table"):
        load_settings(config)
    config.write_text("[hidle]\nenabled = true\n")
    with pytest.raises(UsageError, match="unknown setting 'hidle'"):
        load_settings(config)
