"""Published measurements of real GPUs, which are not part of this repository."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def path_of(name: str) -> Path:
    """Return the expected path of a table, whether it exists or not."""
    return DATA / name
