"""Rows of CSV files with named columns; errors name the file, the line and the column."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProfileError
from gpuenergyd.wire.values import short


def csv_rows(
    path: Path, text: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the position and the cells by column of every row below the header; other columns are ignored.

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
