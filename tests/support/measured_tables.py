"""Published measurements of real GPUs, and inputs that went wrong, which are not part of this repository."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
DATA = SHARED / "data"


def path_of(name: str) -> Path:
    """Return the expected path of a table, whether it exists or not."""
    return DATA / name
