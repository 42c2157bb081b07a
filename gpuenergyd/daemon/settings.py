"""What an administrator can set: defaults, then one TOML file, then the environment, then flags."""

import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from gpuenergyd.core.carbon.intensity import EmissionFactor, SignalKind
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.restore.policy import RestorePolicy

SYSTEM_CONFIG_PATH = Path("/etc/gpuenergyd/config.toml")
DEFAULT_CONFIG_PATH = Path(__file__).with_name("default_config.toml")
"""The commented file that documents every key; `gpuenergyd install` copies it."""
ENVIRONMENT_PREFIX = "GPUENERGYD_"
WORKER_UNIT_DIR = Path("/run/gpuenergyd-gpu")
"""Where a worker that is a unit of its own keeps socket and journal; no setting moves what units say."""

FETCHER_UNIT_DIR = Path("/run/gpuenergyd-carbon")
"""The same of a carbon fetcher that is a unit of its own."""


class Mode(StrEnum):
    """Whether the daemon may change clocks."""

    CONTROL = "control"
    OBSERVE = "observe"


class Processes(StrEnum):
    """How GPU worker and policy host come to be."""

    CHILDREN = "children"
    UNITS = "units"


class Driver(StrEnum):
    """Where GPUs come from."""

    NVML = "nvml"
    SIMULATED = "simulated"


CONSTANT_SLOWDOWN_TARGET = "constant-slowdown"
CARBON_SIGNAL, PRICE_SIGNAL = "carbon", "price"


def default_runtime_dir() -> Path:
    """Return where sockets and the journal live: gone with the boot, as the driver's clock locks are.

    A unit is told its folders by the service manager (`RuntimeDirectory=`, `StateDirectory=`).
    """
    if given := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/run/gpuenergyd")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "gpuenergyd"
    return Path(tempfile.gettempdir()) / f"gpuenergyd-{os.geteuid()}"


def default_state_dir() -> Path:
    """Return where the history lives: it survives a boot."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/gpuenergyd")
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "gpuenergyd"


def _in_runtime_dir(name: str) -> Any:
    return Field(default_factory=lambda known: known.get("runtime_dir", Path()) / name)


def _of_worker(name: str) -> Any:
    """Return a path in the worker's folder: a worker that is a unit has one of its own."""
    return Field(
        default_factory=lambda known: (
            WORKER_UNIT_DIR / name
            if known.get("processes") is Processes.UNITS
            else known.get("runtime_dir", Path()) / name
        )
    )


PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Everything the daemon can be told; each key has a default, a unit in its name and a line in the TOML file."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    mode: Mode = Mode.CONTROL
    processes: Processes = Processes.CHILDREN
    driver: Driver = Driver.NVML
    world_path: Path | None = None
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    state_dir: Path = Field(default_factory=default_state_dir)
    socket_path: Path = _in_runtime_dir("gpuenergyd.sock")
    clock_socket_path: Path = _in_runtime_dir("clock.sock")
    worker_link_path: Path = _of_worker("worker.sock")
    journal_path: Path = _of_worker("journal.json")
    policy_socket_path: Path = _in_runtime_dir("policy.sock")
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
    max_slowdown_ratio: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    warmup_iterations: int = Field(default=2, ge=0, le=10_000)
    baseline_iterations: int = Field(default=10, ge=1, le=10_000)
    sample_period_s: float = Field(default=0.1, ge=0.005, le=60, allow_inf_nan=False)
    policy_time_limit_s: PositiveSeconds = 30.0
    policy_first_time_limit_s: PositiveSeconds = 120.0
    policy_memory_limit_bytes: int | None = Field(default=None, ge=64 * 2**20)
    silence_limit_s: PositiveSeconds = 60.0
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
    carbon_file_path: Path = Field(
        default_factory=lambda known: (
            FETCHER_UNIT_DIR / "carbon.json"
            if known.get("processes") is Processes.UNITS
            else known.get("runtime_dir", Path()) / "carbon.json"
        )
    )
    carbon_budget_ratio: float = Field(default=0.025, ge=0, le=10, allow_inf_nan=False)
    carbon_window_h: float = Field(default=72.0, gt=0, le=8784, allow_inf_nan=False)
    carbon_deadline_at: AwareDatetime | None = None
    carbon_host_power_w: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    carbon_replay_from: AwareDatetime | None = None
    carbon_replay_hour_s: float = Field(default=3600.0, gt=0, le=3600, allow_inf_nan=False)
    max_ranks_per_user: int = Field(default=1024, ge=1)
    max_requests_per_user_per_s: float = Field(default=2000.0, gt=0, allow_inf_nan=False)
    max_connections_per_user: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _world_belongs_to_simulation(self) -> "Settings":
        if self.driver is Driver.SIMULATED and self.world_path is None:
            raise ValueError("driver = 'simulated' needs world_path, the file that holds the simulated GPUs")
        return self

    @model_validator(mode="after")
    def _a_signal_can_be_had(self) -> "Settings":
        if self.carbon_signal == PRICE_SIGNAL and self.carbon_price_path is None:
            raise ValueError("carbon_signal = 'price' needs carbon_price_path, an hourly CSV file")
        if self.target != CONSTANT_SLOWDOWN_TARGET and self.signal_path is None and self.carbon_zone is None:
            raise ValueError(f"target = {self.target!r} needs a signal: carbon_zone, or carbon_signal = a CSV file")
        if self.carbon_replay_from is not None and (self.signal_path is None or self.driver is not Driver.SIMULATED):
            raise ValueError("carbon_replay_from lives a past trace again: for a CSV signal on simulated GPUs only")
        return self

    @property
    def signal_path(self) -> Path | None:
        """The file that jobs follow, None where they follow what the fetcher finds."""
        if self.carbon_signal == PRICE_SIGNAL:
            return self.carbon_price_path
        return None if self.carbon_signal == CARBON_SIGNAL else Path(self.carbon_signal)

    @property
    def asks_network(self) -> bool:
        """Whether a carbon fetcher is needed: a zone is set, and no file says what it emits."""
        return self.carbon_zone is not None and (self.carbon_source is not None or self.signal_path is None)

    @property
    def default_budget_ratio(self) -> float:
        """Slowdown permitted to jobs that name none."""
        if self.target == CONSTANT_SLOWDOWN_TARGET:
            return self.max_slowdown_ratio
        return max(self.max_slowdown_ratio, self.carbon_budget_ratio)

    @property
    def hand_over_path(self) -> Path:
        """What a daemon that is restarted leaves to the next one."""
        return self.runtime_dir / "hand-over.json"

    @property
    def carbon_accounts_path(self) -> Path:
        """What jobs have spent of their slowdown budgets, for the next daemon, however this one ends."""
        return self.state_dir / "carbon-accounts.json"

    @property
    def lock_path(self) -> Path:
        """Held while a daemon lives: the second one on the same folder finds it taken."""
        return self.runtime_dir / "gpuenergyd.lock"


def load_settings(config_path: Path | str | None = None, **overrides: Any) -> Settings:
    """Return the settings; an override of None is as if it had not been given.

    Without `config_path` the system's file is read if it is there.

    Raises:
        UsageError: a file that cannot be read, an unknown key or a bad value; the message names file and key.
    """
    path = Path(config_path) if config_path is not None else None
    if path is None and SYSTEM_CONFIG_PATH.exists():
        path = SYSTEM_CONFIG_PATH
    from_file = _read_toml(path) if path is not None else {}
    flags = {key: value for key, value in overrides.items() if value is not None}
    _refuse_unknown(flags, where="settings")

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
        message = first["msg"].removeprefix("Value error, ")
        if not key:
            raise UsageError(message) from None
        if key in flags:
            where = f"--{key.replace('_', '-')}"
        elif ENVIRONMENT_PREFIX + key.upper() in os.environ:
            where = ENVIRONMENT_PREFIX + key.upper()
        else:
            where = f"{path}: {key}"
        raise UsageError(f"{where} = {first['input']!r}: {message}") from None
    return Settings.model_construct(_fields_set=layered.model_fields_set, **dict(layered))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise UsageError(f"{path}: everybody may write it, so nothing in it is believed; `chmod o-w {path}`")
            content = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    _refuse_unknown(content, where=str(path))
    return content


def _refuse_unknown(given: Mapping[str, Any], *, where: str) -> None:
    for key in given:
        if key not in Settings.model_fields:
            raise UsageError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(Settings.model_fields))}")
