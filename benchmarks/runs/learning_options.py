"""Options that the benchmarks of learning share: the tables that are the truth, the seed and the processes."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.worlds.learning_tables import TrueTable, tables_in


def parser_of(description: str | None, default_tables: Path) -> argparse.ArgumentParser:
    """Return a parser with the shared options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tables", type=Path, default=default_tables, help="folder of CSV tables, searched with its subfolders"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unknown-gpu", action="store_true", help="use nothing that was learned from any table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser


def tables_of(parser: argparse.ArgumentParser, folder: Path) -> Sequence[TrueTable]:
    """Return the tables of a folder; without any, the program ends with an error."""
    tables = tables_in(folder) if folder.is_dir() else []
    if not tables:
        parser.error(f"--tables {folder}: no CSV file there has the columns stage and instruction")
    return tables
