"""`gpuenergyd config get`: the daemon's settings with value, default and source."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import people_console, print_json

config = command_group(
    name="config",
    cls=DocumentedGroup,
    help="Show the daemon's settings and where they come from.",
    epilog="gpuenergyd config get\ngpuenergyd config get policy max_slowdown_ratio",
)


def get(
    *,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Settings to show [default: all].")
    ] = None,
    config_path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration file [default: the system's].")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show settings with value, default and source.

    These are the values of a daemon that is started now with this environment; options of `gpuenergyd serve` override
    them. One KEY prints its value alone. Passwords are not shown.

    Examples:
        gpuenergyd config get
        gpuenergyd config get policy
        gpuenergyd config get --json
    """
    from gpuenergyd.daemon.settings_sources import setting_values  # noqa: PLC0415  heavy: pydantic

    shown = setting_values(config_path, keys or ())
    if as_json:
        print_json({"settings": shown})
    elif len(keys or ()) == 1:
        typer.echo(_text(shown[0].value))
    else:
        from rich import box  # noqa: PLC0415  only tables need it
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=box.SIMPLE, pad_edge=False)
        for title in ("setting", "value", "default", "source"):
            table.add_column(title, overflow="fold")
        for setting in shown:
            is_default = setting.value == setting.default
            style = "" if is_default else "bold"
            default = "" if is_default else _text(setting.default)
            table.add_row(setting.key, Text(_text(setting.value), style=style), Text(default), Text(setting.source))
        people_console().print(table)
    return 0


def _text(value: Any) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ", ".join(map(_text, value)) or "none"
        case dict():
            return ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) or "none"
        case _:
            return str(value)


add_command(config, get)
