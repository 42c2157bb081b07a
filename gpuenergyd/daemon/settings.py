"""The daemon's settings: defaults, then a TOML file, the environment and command-line flags, each overriding the last.

Longer than 400 lines, since it holds every setting with its check and its sources.
"""

import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from gpuenergyd.core.carbon.intensity import EmissionFactor, SignalKind
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.core.policy_api.power import MAX_BUDGET_W
from gpuenergyd.core.policy_api.target import MAX_SLOWDOWN_RATIO
from gpuenergyd.daemon.settings_errors import nearest, reason_text, unknown_text
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.drivers.opening import DRIVERS, installed_drivers
from gpuenergyd.gpu.restore.policy import RestorePolicy
from gpuenergyd.quantities.tariff import MAX_PUE

SYSTEM_CONFIG_PATH = Path("/etc/gpuenergyd/config.toml")
SERVICES_GROUP = "gpuenergyd.host_services"
DEFAULT_CONFIG_PATH = Path(__file__).with_name("default_config.toml")
"""The commented file that documents every setting; `gpuenergyd install` copies it."""
ENVIRONMENT_PREFIX = "GPUENERGYD_"
_JOB_PREFIX = "GPUENERGYD_JOB_"
"""Prefix of training programs' variables; after it, some have the name of a setting."""
WORKER_UNIT_DIR = Path("/run/gpuenergyd-gpu")
"""Directory of the socket and journal of the GPU worker's systemd unit; fixed in the unit files."""

FETCHER_UNIT_DIR = Path("/run/gpuenergyd-carbon")
"""Directory of the output file of the carbon fetcher's systemd unit; fixed in the unit files."""


class Mode(StrEnum):
    """Whether the daemon sets clocks or only observes."""

    CONTROL = "control"
    OBSERVE = "observe"


class Processes(StrEnum):
    """Whether the helper processes are child processes or systemd units."""

    CHILDREN = "children"
    UNITS = "units"


NVML, SIMULATED, COMMAND = "nvml", "simulated", "command"
"""Names of drivers that other settings depend on; packages may provide more drivers."""
REFUSED_IN_OBSERVE = "mode = 'observe': the daemon never changes a GPU; set mode = \"control\" and restart the daemon"
"""Reply to a request for a change while the daemon observes."""
_FLAGS = {"max_slowdown_ratio": "--max-slowdown", "world_path": "--world"}
"""Options of `gpuenergyd serve` whose names differ from their settings."""
_DATABASE_KINDS = frozenset({"sqlite", "postgresql"})
_SECRET = re.compile(r"(?<=:)[^:/@]+(?=@)")
"""Matches the password in a URL."""
_RANGE_ERRORS = frozenset({"greater_than_equal", "less_than_equal"})
CONSTANT_SLOWDOWN_TARGET = "constant-slowdown"
WATER_FILL = "water-fill"
CARBON_SIGNAL, PRICE_SIGNAL = "carbon", "price"


def default_runtime_dir() -> Path:
    """Return the default directory of the sockets and journal, which must be empty after a reboot.

    In a systemd unit it is the one of `RuntimeDirectory=`.
    """
    if from_unit := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(from_unit)
    if os.geteuid() == 0:
        return Path("/run/gpuenergyd")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "gpuenergyd"
    return Path(tempfile.gettempdir()) / f"gpuenergyd-{os.geteuid()}"


def default_state_dir() -> Path:
    """Return the default directory of the database, which must survive a reboot; in a unit, `StateDirectory=`."""
    if from_unit := os.environ.get("STATE_DIRECTORY"):
        return Path(from_unit)
    if os.geteuid() == 0:
        return Path("/var/lib/gpuenergyd")
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "gpuenergyd"


def _default_mode(known: Mapping[str, Any]) -> Mode:
    """Return control mode for simulated GPUs; real GPUs are changed only if a setting requests it."""
    return Mode.CONTROL if known.get("driver") == SIMULATED else Mode.OBSERVE


def _in_runtime_dir(name: str) -> Any:
    return Field(default_factory=lambda known: known.get("runtime_dir", Path()) / name)


def _in_unit_dir(unit_dir: Path, name: str) -> Any:
    """Return a path in a unit's directory, or in the runtime directory if the process is a child."""
    return Field(
        default_factory=lambda known: (
            unit_dir / name if known.get("processes") is Processes.UNITS else known.get("runtime_dir", Path()) / name
        )
    )


class Settings(BaseSettings):
    """All settings of the daemon; `default_config.toml` documents each of them."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    driver: str = NVML
    mode: Mode = Field(default_factory=_default_mode)
    processes: Processes = Processes.CHILDREN
    world_path: Path | None = None
    commands_path: Path = Path("/etc/gpuenergyd/commands.toml")
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    state_dir: Path = Field(default_factory=default_state_dir)
    socket_path: Path = _in_runtime_dir("gpuenergyd.sock")
    clock_socket_path: Path = _in_runtime_dir("clock.sock")
    journal_path: Path = _in_unit_dir(WORKER_UNIT_DIR, "journal.json")
    keep_on_restart_s: float = Field(default=10.0, ge=0, le=60, allow_inf_nan=False)
    database_url: str = Field(
        default_factory=lambda known: f"sqlite:///{known.get('state_dir', Path()) / 'history.sqlite3'}"
    )
    database_batch_s: float = Field(default=10.0, ge=0.1, le=600, allow_inf_nan=False)
    host_name: str | None = Field(default=None, min_length=1, max_length=256)
    history_reserve_bytes: int = Field(default=32 * 2**20, ge=0, le=2**40)
    history_max_bytes: int = Field(default=0, ge=0, le=2**50)
    history_samples_kept_hours: float = Field(default=48, ge=0, le=100_000, allow_inf_nan=False)
    history_seconds_kept_days: float = Field(default=7, ge=0, le=100_000, allow_inf_nan=False)
    history_minutes_kept_days: float = Field(default=396, ge=1, le=100_000, allow_inf_nan=False)
    history_timelines_kept_days: float = Field(default=30, ge=0, le=100_000, allow_inf_nan=False)
    socket_group: str | None = None
    control_groups: tuple[str, ...] = ()
    control_users: tuple[str, ...] = ()
    admin_groups: tuple[str, ...] = ()
    requires_gpu_use: bool = True
    policy: str = Field(default="bubble-aware", min_length=1, max_length=256)
    policy_options: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    max_slowdown_ratio: float = Field(default=0.0, ge=0, le=MAX_SLOWDOWN_RATIO, allow_inf_nan=False)
    warmup_iterations: int = Field(default=2, ge=0, le=10_000)
    baseline_iterations: int = Field(default=10, ge=1, le=10_000)
    sample_period_s: float = Field(default=0.1, ge=0.005, le=60, allow_inf_nan=False)
    policy_memory_limit_bytes: int | None = Field(default=None, ge=64 * 2**20)
    silence_limit_s: float = Field(default=60.0, gt=0, le=86_400, allow_inf_nan=False)
    levers: Annotated[tuple[Lever, ...], Field(min_length=1)] = tuple(Lever)
    restore_policy: RestorePolicy = RestorePolicy.ONLY_IF_OURS
    baseline_sm_clock_mhz: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    target: str = Field(default="constant-slowdown", min_length=1, max_length=256)
    carbon_zone: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    carbon_signal: str = Field(default="carbon", min_length=1)
    carbon_price_path: Path | None = None
    carbon_source: str | None = None
    carbon_key_path: Path | None = None
    carbon_base_url: str | None = None
    carbon_kind: SignalKind | None = None
    carbon_factor: EmissionFactor | None = None
    carbon_fixed_g_per_kwh: float | None = Field(default=None, ge=0, le=2000, allow_inf_nan=False)
    carbon_file_path: Path = _in_unit_dir(FETCHER_UNIT_DIR, "carbon.json")
    carbon_budget_ratio: float = Field(default=0.025, ge=0, le=MAX_SLOWDOWN_RATIO, allow_inf_nan=False)
    carbon_window_h: float = Field(default=72.0, gt=0, le=8784, allow_inf_nan=False)
    carbon_host_power_w: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    pue: float = Field(default=1.0, ge=1, le=MAX_PUE, allow_inf_nan=False)
    carbon_replay_from: AwareDatetime | None = None
    carbon_replay_hour_s: float = Field(default=3600.0, gt=0, le=3600, allow_inf_nan=False)
    power_budget_w: float | None = Field(default=None, gt=0, le=MAX_BUDGET_W, allow_inf_nan=False)
    power_schedule_path: Path | None = None
    power_target: str = Field(default=WATER_FILL, min_length=1, max_length=256)
    power_floor_ratio: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    power_ramp_w_per_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_W, allow_inf_nan=False)
    service_options: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    max_ranks_per_user: int = Field(default=1024, ge=1)
    max_jobs_per_user_per_h: int = Field(default=2000, ge=1)
    max_requests_per_user_per_s: float = Field(default=2000.0, gt=0, allow_inf_nan=False)
    max_connections_per_user: int = Field(default=1024, ge=1)

    @field_validator("driver")
    @classmethod
    def _require_installed_driver(cls, name: str) -> str:
        if name not in DRIVERS and name not in (installed := installed_drivers()):
            raise ValueError(f"must be one of {', '.join(sorted({*DRIVERS, *installed}))}")
        return name

    @field_validator("database_url")
    @classmethod
    def _require_supported_database(cls, url: str) -> str:
        """Refuse a database that the daemon cannot write, because it would run without history."""
        kind, _, rest = url.partition("://")
        if rest and (kind.partition("+")[0] not in _DATABASE_KINDS or (kind == "sqlite" and not rest.startswith("/"))):
            raise ValueError(
                f"{kind}:// is not supported; valid are sqlite:////ABSOLUTE/PATH and"
                " postgresql://USER:PASSWORD@HOST/DATABASE"
            )
        return url

    @field_validator("policy_options")
    @classmethod
    def _require_plain_options(
        cls, tables: dict[str, dict[str, bool | int | float | str]]
    ) -> dict[str, dict[str, bool | int | float | str]]:
        """Refuse options that cannot be written after a policy's name; the policy itself checks their values."""
        for policy, options in tables.items():
            for name, value in options.items():
                if not name.isidentifier() or not str(value).isprintable() or "," in str(value):
                    raise ValueError(
                        f"[policy.{policy}] {name} = {value!r}: must be a name, and a value without commas"
                    )
        return tables

    @field_validator("*", mode="after")
    @classmethod
    def _make_absolute(cls, value: Any) -> Any:
        """Resolve a path against the daemon's start directory, since clients run in other directories."""
        return value.absolute() if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _require_world_for_simulation(self) -> "Settings":
        if self.driver == SIMULATED and self.world_path is None:
            raise ValueError("driver = 'simulated' requires world_path, the file with the simulated GPUs")
        return self

    @model_validator(mode="after")
    def _require_signal(self) -> "Settings":
        if self.carbon_signal == PRICE_SIGNAL and self.carbon_price_path is None:
            raise ValueError("carbon_signal = 'price' requires carbon_price_path, an hourly CSV file")
        if self.target != CONSTANT_SLOWDOWN_TARGET and self.signal_path is None and self.carbon_zone is None:
            raise ValueError(
                f"target = {self.target!r} requires a signal: set carbon_zone, or carbon_signal to a CSV file"
            )
        if self.carbon_replay_from is not None and (self.signal_path is None or self.driver != SIMULATED):
            raise ValueError(
                "carbon_replay_from requires driver = 'simulated' and carbon_signal set to a CSV file or \"price\""
            )
        return self

    @property
    def is_observing(self) -> bool:
        """Whether the daemon never changes a GPU."""
        return self.mode is Mode.OBSERVE

    @property
    def mode_note(self) -> str | None:
        """How to enable control, if the daemon only observes because no mode is set; else None."""
        if not self.is_observing or "mode" in self.model_fields_set:
            return None
        return (
            "mode observe: no mode is set, and no GPU is changed (up to version 0.3 GPUs were); to control set"
            ' mode = "control" in the configuration and restart the daemon'
        )

    @property
    def signal_path(self) -> Path | None:
        """The CSV file of the signal, None if the signal comes from the carbon fetcher."""
        if self.carbon_signal == PRICE_SIGNAL:
            return self.carbon_price_path
        return None if self.carbon_signal == CARBON_SIGNAL else Path(self.carbon_signal)

    @property
    def needs_carbon_fetcher(self) -> bool:
        """Whether a carbon fetcher is needed: a zone is set, and no CSV file replaces its data source."""
        return self.carbon_zone is not None and (self.carbon_source is not None or self.signal_path is None)

    @property
    def default_budget_ratio(self) -> float:
        """Permitted slowdown of jobs that do not set one."""
        if self.target == CONSTANT_SLOWDOWN_TARGET:
            return self.max_slowdown_ratio
        return max(self.max_slowdown_ratio, self.carbon_budget_ratio)

    @property
    def driver_path(self) -> Path | None:
        """The file that the driver needs: the simulated GPUs, or the commands."""
        return self.commands_path if self.driver == COMMAND else self.world_path

    @property
    def worker_link_path(self) -> Path:
        """Unix socket between the daemon and the GPU worker."""
        return (WORKER_UNIT_DIR if self.processes is Processes.UNITS else self.runtime_dir) / "worker.sock"

    @property
    def policy_socket_path(self) -> Path:
        """Unix socket of the policy host's systemd unit."""
        return self.runtime_dir / "policy.sock"

    @property
    def hand_over_path(self) -> Path:
        """File in which a daemon leaves its running jobs to the next one at a normal restart."""
        return self.runtime_dir / "hand-over.json"

    @property
    def operator_orders_path(self) -> Path:
        """File with operators' orders for running jobs, for the next daemon process."""
        return self.runtime_dir / "operator-orders.json"

    @property
    def time_accounts_path(self) -> Path:
        """File with the time accounts of the running jobs, for the next daemon process."""
        return self.runtime_dir / "time-accounts.json"

    @property
    def carbon_accounts_path(self) -> Path:
        """File with the slowdown accounts of the running jobs, for the next daemon process."""
        return self.state_dir / "carbon-accounts.json"

    @property
    def power_budget_path(self) -> Path:
        """File with the last requested power budget, for the next daemon process."""
        return self.state_dir / "power-budget.json"

    @property
    def switch_latencies_path(self) -> Path:
        """File with the measured clock changes, for the next daemon process."""
        return self.state_dir / "switch-latencies.json"

    @property
    def lock_path(self) -> Path:
        """Lock file that allows one daemon per runtime directory."""
        return self.runtime_dir / "gpuenergyd.lock"


def load_settings(config_path: Path | str | None = None, **overrides: Any) -> Settings:
    """Return the settings; overrides of None are ignored.

    Without `config_path`, `SYSTEM_CONFIG_PATH` is read if it exists.

    Raises:
        UsageError: the file cannot be read, a key is unknown or a value is invalid; the message names file and key.
    """
    path, from_file = read_config(config_path)
    flags = {key: value for key, value in overrides.items() if value is not None}
    _require_known(flags, where="settings")
    _require_known_variables()

    class _Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=from_file)

    try:
        layered = _Layered(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        message = reason_text(first)
        if first["type"] in _RANGE_ERRORS:
            message = _range_text(key) or message
        if not key:
            raise UsageError(message) from None
        if key in flags:
            where = _FLAGS.get(key, f"--{key.replace('_', '-')}")
        elif ENVIRONMENT_PREFIX + key.upper() in os.environ:
            where = ENVIRONMENT_PREFIX + key.upper()
        else:
            where = f"{path}: {key}"
        raise UsageError(f"{where} = {without_password(repr(first['input']))}: {message}") from None
    except SettingsError as error:  # a list or table in an environment variable
        key = next((key for key in Settings.model_fields if f'"{key}"' in str(error)), "")
        variable = ENVIRONMENT_PREFIX + key.upper()
        raise UsageError(f"{variable} = {os.environ.get(variable, '')!r}: must be JSON, e.g. '[\"a\"]'") from None
    return Settings.model_construct(_fields_set=layered.model_fields_set, **dict(layered))


def read_config(config_path: Path | str | None) -> tuple[Path | None, dict[str, Any]]:
    """Return the configuration file, None without one, and the settings in it.

    Raises:
        UsageError: the file cannot be read, or a key is unknown.
    """
    path = Path(config_path) if config_path is not None else None
    if path is None and SYSTEM_CONFIG_PATH.exists():
        path = SYSTEM_CONFIG_PATH
    return path, _read_toml(path) if path is not None else {}


def without_password(value: Any) -> Any:
    """Return a value, with the password hidden if it is a URL."""
    return _SECRET.sub("***", value) if isinstance(value, str) else value


def _range_text(key: str) -> str | None:
    """Return the range of a numeric setting in words; None unless both ends are inclusive."""
    field = Settings.model_fields[key]
    ends = {
        name: end
        for bound in field.metadata
        for name in ("ge", "le")
        if (end := getattr(bound, name, None)) is not None
    }
    return f"must be from {ends['ge']:g} to {ends['le']:g}" if len(ends) == 2 else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise UsageError(
                    f"{path}: refusing to load a world-writable configuration file; run `chmod o-w {path}`"
                )
            content = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    content = _with_service_tables(_with_policy_tables(content, where=str(path)))
    _require_known(content, where=str(path))
    return content


def _with_policy_tables(content: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Convert tables `[policy.NAME]` to the setting `policy_options`, and `default` in `[policy]` to `policy`.

    In TOML, a key cannot be both a string and a table.
    """
    table = content.get("policy")
    if not isinstance(table, dict):
        return content
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name in table:
        if name != "default" and name not in tables:
            raise UsageError(f"{where}: policy.{name}: valid are policy.default and tables [policy.NAME]")
    if tables and "policy_options" in content:
        raise UsageError(f"{where}: give policy_options or tables [policy.NAME], not both")
    others = {key: value for key, value in content.items() if key != "policy"}
    if "default" in table:
        others["policy"] = table["default"]
    return {**others, "policy_options": tables} if tables else others


def _with_service_tables(content: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose tables `[NAME]` of installed services are `service_options`."""
    tables = {
        key: value for key, value in content.items() if isinstance(value, dict) and key not in Settings.model_fields
    }
    if not tables:
        return content
    tables = {name: tables[name] for name in entry_points(group=SERVICES_GROUP).names if name in tables}
    others = {key: value for key, value in content.items() if key not in tables}
    given = others.get("service_options", {})
    return {**others, "service_options": {**given, **tables}} if isinstance(given, dict) else others


def _require_known(given: Mapping[str, Any], *, where: str) -> None:
    for key in given:
        if key not in Settings.model_fields:
            raise UsageError(f"{where}: unknown setting {key!r}; {unknown_text(key, Settings.model_fields)}")


def _require_known_variables() -> None:
    """Refuse variables that look like misspelled settings; other variables may belong to programs and plugins."""
    for name in sorted(os.environ):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(_JOB_PREFIX) or key in Settings.model_fields:
            continue
        if (meant := nearest(key, Settings.model_fields)) is not None:
            raise UsageError(f"{name}: no such setting; did you mean {ENVIRONMENT_PREFIX}{meant.upper()}?")
