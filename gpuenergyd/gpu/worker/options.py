"""How a GPU worker was started: which driver, where it listens and writes, and how patient it is."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the command line says."""

    driver: str
    world_path: Path | None
    link_path: Path
    journal_path: Path
    sample_period_s: float
    core_uid: int | None
    exits_with_core: bool
    observes_only: bool
    read_deadline_s: float
    set_deadline_s: float
    core_silence_limit_s: float
    keeper_pid: int
