"""Settings reference, generated from the default configuration file and the defaults in the code."""

from docs.site.manual.settings_text import SettingText, default_text, described_settings, environment_variable
from docs.site.markdown import block, code, page, table


def settings_page() -> str:
    """Return the page with all settings: explanation, default, example and environment variable."""
    return page(
        "Settings",
        "`/etc/gpuenergyd/config.toml` is TOML; unknown keys and world-writable files are errors. Environment variables"
        " override the file, and options of `gpuenergyd serve` override both.",
        *(_setting(setting) for setting in described_settings()),
    )


def _setting(setting: SettingText) -> str:
    rows = [(code(key), code(default_text(key) or "derived"), code(environment_variable(key))) for key in setting.keys]
    example = block("\n".join(f"{key} = {value}" for key, value in setting.examples), "toml")
    return "\n".join(
        [
            f"## {', '.join(setting.keys)}\n",
            "\n".join(setting.explanation) + "\n",
            table(("key", "default", "variable"), rows),
            example,
        ]
    )
