"""Reading plain arguments of `report` without Typer, which takes longer to load than a report to write.

Whatever is not plain (a request for help, an unknown option, a value that makes no sense) is left to Typer, which says
what is right. What both accept is the same; a test compares them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from gpuenergyd.cli.commands.report_output import Format, GroupBy, ReportRequest


def _price(text: str) -> float:
    price = float(text)
    if not isfinite(price) or price < 0:
        raise ValueError(text)
    return price


_VALUES: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "--since": ("since", str),
    "--until": ("until", str),
    "--job": ("job", str),
    "--group-by": ("group_by", GroupBy),
    "--tag": ("tag", str),
    "--price-per-kwh": ("price_per_kwh", _price),
    "--tariff": ("tariff", Path),
    "--format": ("output_format", Format),
    "--out": ("out", Path),
    "--database": ("database", str),
}
_FLAGS: Mapping[str, str] = {"--json": "as_json"}


def plain_report(arguments: Sequence[str]) -> ReportRequest | None:
    """Return what `gpuenergyd report ...` asks for; None for any other command, and where Typer has to look."""
    if not arguments or arguments[0] != "report":
        return None
    found: dict[str, Any] = {}
    waiting = iter(arguments[1:])
    for argument in waiting:
        option, is_joined, text = argument.partition("=")
        if argument in _FLAGS:
            found[_FLAGS[argument]] = True
            continue
        value = text if is_joined else next(waiting, "-")
        if option not in _VALUES or (not is_joined and value.startswith("-")):
            return None
        name, read = _VALUES[option]
        try:
            found[name] = read(value)
        except ValueError:
            return None
    return ReportRequest(**found)
