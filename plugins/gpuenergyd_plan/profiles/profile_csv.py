"""Profile tables: parses CSV rows `stage,instruction,frequency,time,energy` into clock options by instruction class."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import KIND_OF_WORD, ClockOption, InstructionProfile, instruction_profile
from gpuenergyd.errors import ProfileError
from gpuenergyd_plan.profiles.values import MAX_STAGES, csv_rows, number, whole

PROFILE_COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_RANK_COLUMNS = ("dp_rank", "tp_rank")
"""Columns of Zeus's profiler, which has rows for every rank of a stage."""
_REQUIRED_WORDS = ("forward", "backward")
_SPLIT_WORDS = ("input", "weight")


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """Profile table of a pipeline: forward and backward of each stage, one stage per pipeline rank.

    Stages may also have input and weight gradients, the two parts of a split backward; all stages or none do.
    """

    name: str
    num_stages: int
    classes: Mapping[InstructionClass, InstructionProfile]

    @property
    def has_split_backward(self) -> bool:
        """Whether input and weight gradients were measured."""
        return any(key.kind is InstructionKind.I for key in self.classes)


def parse_profile_table(path: Path, text: str) -> ProfileTable:
    """Parse a CSV text; `path` names the file in errors.

    Raises:
        ProfileError: a column is missing or a value is invalid.
    """
    measured: dict[InstructionClass, dict[int, dict[tuple[str, ...], ClockOption]]] = {}
    for where, cells in csv_rows(path, text, PROFILE_COLUMNS, _RANK_COLUMNS):
        key, option = _table_row(where, cells)
        of_ranks = measured.setdefault(key, {}).setdefault(option.sm_clock_mhz, {})
        rank = tuple(cells.get(column, "") for column in _RANK_COLUMNS)
        if rank in of_ranks:
            raise ProfileError(
                f"{where}: {cells['instruction']} of stage {key.pp_rank} at {option.sm_clock_mhz} MHz is given twice"
            )
        of_ranks[rank] = option
    options = {key: [_of_stage(rows) for rows in clocks.values()] for key, clocks in measured.items()}
    if not options:
        raise ProfileError(f"{path}: no measurements below the header")
    num_stages = max(key.pp_rank for key in options) + 1
    words: tuple[str, ...] = _REQUIRED_WORDS
    if any(key.kind in {InstructionKind.I, InstructionKind.W} for key in options):
        words += _SPLIT_WORDS
    for stage in range(num_stages):
        for word in words:
            kind = KIND_OF_WORD[word]
            if InstructionClass(stage, kind) not in options:
                given = sorted({key.pp_rank for key in options if word in _REQUIRED_WORDS or key.kind is kind})
                stages = ", ".join(map(str, given)) or "none"
                of_word = "" if word in _REQUIRED_WORDS else f" with {word} rows, which are for all stages or none"
                raise ProfileError(f"{path}: no {word} of stage {stage}; stages given{of_word}: {stages}")
    return ProfileTable(
        name=path.stem,
        num_stages=num_stages,
        classes={key: instruction_profile(options[key], where=str(path)) for key in sorted(options)},
    )


def _of_stage(of_ranks: Mapping[tuple[str, ...], ClockOption]) -> ClockOption:
    """Return the time of a stage's slowest rank and the mean energy of its ranks."""
    options = list(of_ranks.values())
    energy_j = sum(option.energy_j for option in options) / len(options)
    return replace(max(options, key=lambda option: option.time_s), energy_j=energy_j)


def _table_row(where: str, cells: Mapping[str, str]) -> tuple[InstructionClass, ClockOption]:
    stage = whole(where, "stage", cells["stage"])
    if not 0 <= stage < MAX_STAGES:
        raise ProfileError(f"{where}: stage {cells['stage']}: must be 0 to {MAX_STAGES - 1}")
    kind = KIND_OF_WORD.get(cells["instruction"].lower())
    if kind is None:
        raise ProfileError(f"{where}: instruction {cells['instruction']!r}: must be forward, backward, input or weight")
    sm_clock_mhz = whole(where, "frequency", cells["frequency"])
    if sm_clock_mhz <= 0:
        raise ProfileError(f"{where}: frequency {cells['frequency']}: must be > 0 MHz")
    time_s = number(where, "time", cells["time"])
    if time_s <= 0:
        raise ProfileError(f"{where}: time {cells['time']}: must be > 0 s")
    energy_j = number(where, "energy", cells["energy"])
    if energy_j < 0:
        raise ProfileError(f"{where}: energy {cells['energy']}: must be >= 0 J")
    return InstructionClass(stage, kind), ClockOption(sm_clock_mhz, time_s, energy_j)
