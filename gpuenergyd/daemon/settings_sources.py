"""Where each setting comes from: the environment, the configuration file, or its default."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd.daemon.settings import ENVIRONMENT_PREFIX, Settings, load_settings, read_config, without_password
from gpuenergyd.daemon.settings_errors import unknown_text
from gpuenergyd.errors import UsageError


@dataclass(frozen=True, slots=True)
class SettingValue:
    """One setting with its value, as a JSON type."""

    key: str
    value: Any
    default: Any
    source: str
    """`default`, `environment VARIABLE` or `file PATH`."""


def setting_values(config_path: Path | None, keys: Sequence[str] = ()) -> tuple[SettingValue, ...]:
    """Return the settings, or only those in `keys`, of a daemon started now with this environment.

    Raises:
        UsageError: a key is unknown, or the settings are invalid.
    """
    for key in keys:
        if key not in Settings.model_fields:
            raise UsageError(f"no setting {key!r}; {unknown_text(key, Settings.model_fields)}")
    settings = load_settings(config_path)
    path, from_file = read_config(config_path)
    shown = settings.model_dump()
    found = []
    for key in keys or Settings.model_fields:
        if os.environ.get(variable := ENVIRONMENT_PREFIX + key.upper()):
            source = f"environment {variable}"
        elif key in from_file:
            source = f"file {path}"
        else:
            source = "default"
        default = Settings.model_fields[key].get_default(call_default_factory=True, validated_data=dict(settings))
        found.append(SettingValue(key, without_password(shown[key]), without_password(_plain(default)), source))
    return tuple(found)


def _plain(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value
