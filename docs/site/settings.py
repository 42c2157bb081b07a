"""The settings' reference, from the commented file that `gpuenergyd install` writes and the defaults in the code."""

from docs.site.markdown import block, code, page, table
from gpuenergyd.cli.help.settings_text import SettingText, default_text, described_settings, environment_variable


def settings_page() -> str:
    """Return every setting with its explanation, default, example and variable."""
    return page(
        "Settings",
        "`/etc/gpuenergyd/config.toml` is TOML; an unknown key is an error, and so is a file that everybody may write."
        " Later wins: the file, then the environment, then flags of `gpuenergyd serve`.",
        *(_setting(setting) for setting in described_settings()),
    )


def _setting(setting: SettingText) -> str:
    rows = [
        (code(key), code(default_text(key) or "worked out"), code(environment_variable(key))) for key in setting.keys
    ]
    example = block("\n".join(f"{key} = {value}" for key, value in setting.examples), "toml")
    return "\n".join(
        [
            f"## {', '.join(setting.keys)}\n",
            "\n".join(setting.explanation) + "\n",
            table(("key", "default", "variable"), rows),
            example,
        ]
    )
