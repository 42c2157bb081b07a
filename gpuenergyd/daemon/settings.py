"""What an administrator can set: defaults, then one TOML file, then the environment, then flags."""

import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.restore_rules import RestorePolicy

SYSTEM_CONFIG_PATH = Path("/etc/gpuenergyd/config.toml")
DEFAULT_CONFIG_PATH = Path(__file__).with_name("default_config.toml")
"""The commented file that documents every key; `gpuenergyd install` copies it."""
ENVIRONMENT_PREFIX = "GPUENERGYD_"
WORKER_UNIT_DIR = Path("/run/gpuenergyd-gpu")
"""Where a worker that is a unit of its own keeps socket and journal; no setting moves what units say."""


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
    max_ranks_per_user: int = Field(default=1024, ge=1)
    max_requests_per_user_per_s: float = Field(default=2000.0, gt=0, allow_inf_nan=False)
    max_connections_per_user: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _world_belongs_to_simulation(self) -> "Settings":
        if self.driver is Driver.SIMULATED and self.world_path is None:
            raise ValueError("driver = 'simulated' needs world_path, the file that holds the simulated GPUs")
        return self

    @property
    def hand_over_path(self) -> Path:
        """What a daemon that is restarted leaves to the next one."""
        return self.runtime_dir / "hand-over.json"

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
