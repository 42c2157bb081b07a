"""Running programs that are known to change settings of GPUs: who a foreign change may come from.

The driver does not tell who changed a setting. The names of all processes are readable without privilege.
"""

from collections.abc import Iterator
from pathlib import Path

_CHANGES_GPUS = frozenset(
    {"nv-hostengine", "dcgmi", "nvidia-smi", "nvidia-settings", "nvidia-powerd", "zeusd", "geopmd", "tuned", "eard"}
)
"""Names as the kernel keeps them, 15 characters at most; nv-hostengine is DCGM's daemon, which sets targets again."""
_MAX_NAMED = 3


def suspects_text(proc: Path = Path("/proc")) -> str:
    """Return the running programs that may have changed a GPU, with their pids; empty if none is known."""
    found = sorted(_running(proc))
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(f"{name} pid {pid}" for name, pid in found[:_MAX_NAMED]) + more


def _running(proc: Path) -> Iterator[tuple[str, int]]:
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # it has ended
        if name in _CHANGES_GPUS:
            yield name, int(folder.name)
