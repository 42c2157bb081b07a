"""Validation of numbers and of CSV rows in files; errors name the place and the value."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProfileError

MAX_STAGES = 4096


def number(where: str, name: str, value: object) -> float:
    """Return a CSV cell or JSON value as a finite number.

    Raises:
        ProfileError: the value is not a finite number; the message starts with `where`.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError  # noqa: TRY004, TRY301  one message for all invalid values
        found = float(value)
    except (ValueError, OverflowError):
        raise ProfileError(f"{where}: {name} {short(value)}: not a number") from None
    if not math.isfinite(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a finite number")
    return found


def whole(where: str, name: str, value: object) -> int:
    """Return a CSV cell or JSON value as an integer, or raise ProfileError if it is not one."""
    found = number(where, name, value)
    if found != int(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a whole number")
    return int(found)


def short(value: object) -> str:
    """Return a value for an error message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def csv_rows(
    path: Path, text: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the position of every row below the header, and its cells by column; ignore other columns.

    Raises:
        ProfileError: the text is not CSV, a column is missing or given twice, or a row is too short.
    """
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    places: dict[str, int] | None = None
    try:
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if places is None:
                places = _places(where, row, columns, optional)
                continue
            if len(row) <= max(places.values()):
                raise ProfileError(
                    f"{where}: {count_text(len(row), 'value')}, the header has"
                    f" {count_text(max(places.values()) + 1, 'column')}"
                )
            yield where, {name: row[at].strip() for name, at in places.items()}
    except csv.Error as error:
        raise ProfileError(f"{path}:{rows.line_num}: not CSV: {error}") from None


def _places(where: str, header: list[str], columns: Sequence[str], optional: Sequence[str]) -> dict[str, int]:
    names = [cell.strip().lower() for cell in header]
    for wanted in (*columns, *(name for name in optional if name in names)):
        if names.count(wanted) != 1:
            problem = "no column" if wanted not in names else "more than one column"
            raise ProfileError(
                f"{where}: {problem} {wanted!r}; expected the header {','.join(columns)},"
                f" found {short(','.join(names))}"
            )
    return {wanted: names.index(wanted) for wanted in (*columns, *optional) if wanted in names}
