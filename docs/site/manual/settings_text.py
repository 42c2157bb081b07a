"""Every setting with its explanation, parsed from the commented default configuration file."""

import re
from dataclasses import dataclass
from typing import Any

from gpuenergyd.daemon.settings import DEFAULT_CONFIG_PATH, ENVIRONMENT_PREFIX, Settings

_KEY = re.compile(r"(?:# )?([a-z][a-z0-9_]*) = (.+)")


@dataclass(frozen=True, slots=True)
class SettingText:
    """One or more settings that share an explanation, each with an example value in TOML."""

    explanation: tuple[str, ...]
    """Lines of text; list items begin with a dash."""
    examples: tuple[tuple[str, str], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the settings."""
        return tuple(key for key, _ in self.examples)


def described_settings() -> tuple[SettingText, ...]:
    """Return all settings in the order of the file."""
    found = []
    blocks = DEFAULT_CONFIG_PATH.read_text(encoding="utf-8").split("\n\n")
    for block in blocks[1:]:
        lines = block.strip().splitlines()
        keys = [(match[1], match[2]) for line in lines if (match := _KEY.fullmatch(line)) is not None]
        known = [(key, value) for key, value in keys if key in Settings.model_fields]
        text = [line.removeprefix("#").strip() for line in lines if not _is_one_of(line, known)]
        found.append(SettingText(tuple(text), tuple(known)))
    return tuple(found)


def environment_variable(key: str) -> str:
    """Return the environment variable that overrides a setting."""
    return ENVIRONMENT_PREFIX + key.upper()


def default_text(key: str) -> str | None:
    """Return a setting's default in TOML; None if it is derived from other settings."""
    field = Settings.model_fields[key]
    if field.default_factory is not None and not field.default_factory_takes_validated_data:
        value: Any = field.get_default(call_default_factory=True)
        return str(value) if value in ({}, ()) else None
    return None if field.is_required() or field.default_factory is not None else _toml(field.default)


def _toml(value: Any) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case int() | float():
            return str(value)
        case _:
            return f'"{value}"'


def _is_one_of(line: str, known: list[tuple[str, str]]) -> bool:
    match = _KEY.fullmatch(line)
    return match is not None and (match[1], match[2]) in known
