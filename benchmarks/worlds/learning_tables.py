"""Tables of time and energy by clock as the truth of jobs that learn from their own plans.

Two formats: profiles as `gpuenergyd plan` reads them, and curves measured during trainings (`*_time_by_freq.csv`). The
GPU model, the model family and the number of microbatches follow from the file's name. The data are not part of this
repository. Tables of BLOOM and Wide-ResNet are kept aside for judging: nothing may be learned from them.

Apart from these, tables are drawn from formulas on six GPU models, with deviations of single clocks added.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_policies.learning.job_profile import LOWEST_RATIO
from gpuenergyd_sim.virtual_training.random_jobs import random_job

F, B = InstructionKind.F, InstructionKind.B
_KINDS = {"forward": F, "backward": B}
_GPUS = {"a100-sxm": "A100-SXM", "a100": "A100-PCIE", "a40": "A40", "v100": "V100", "h100": "H100"}
_BLOCKING_W = {"A100-SXM": 83.64, "A100-PCIE": 83.64, "A40": 70.38}
"""Published power while waiting for a peer; the A100's figure is that of the SXM module."""
_FAMILIES = ("gpt3", "bert", "t5", "bloom", "wide-resnet", "wresnet", "wrn")
KEPT_ASIDE = ("bloom", "wide-resnet", "wresnet", "wrn")
_LOWER_PART = 0.86
"""Clocks up to this share of the maximum show how times scale with the clock, below any cap."""
_MAX_SPREAD = 0.25
_SCATTER_RATIO = 0.0015
"""Scale of the t distribution that deviations of single clocks are drawn from, for formulas."""


@dataclass(frozen=True, slots=True)
class TrueTable:
    """One table: the options of every class, highest clock first, and the SM clock of each class at full speed."""

    name: str
    gpu: str
    family: str
    num_microbatches: int
    profile: PipelineProfile
    full_speed_mhz: Mapping[InstructionClass, float]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return 1 + max(key.pp_rank for key in self.profile.classes)


def tables_in(folder: Path) -> list[TrueTable]:
    """Return the tables in a folder and below, in order of their names."""
    found = []
    for path in sorted(folder.rglob("*.csv")):
        with path.open() as file:
            names = set(csv.DictReader(file).fieldnames or ())
        if {"stage", "instruction"} <= names:
            found.append(read_table(path))
    return found


def read_table(path: Path) -> TrueTable:
    """Return the table of one file."""
    options: dict[InstructionClass, list[ClockOption]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            key = InstructionClass(int(row["stage"]), _KINDS[row["instruction"]])
            clock = int(float(row.get("frequency") or row["frequency_mhz"]))
            time_s = float(row.get("time") or row["time_mean_s"])
            energy_j = float(row.get("energy") or row["energy_fitted_j"])
            options[key].append(ClockOption(clock, time_s, energy_j))
    top = max(option.sm_clock_mhz for own in options.values() for option in own)
    classes = {
        key: instruction_profile([o for o in own if o.sm_clock_mhz >= LOWEST_RATIO * top], where=path.name)
        for key, own in sorted(options.items())
    }
    name = path.stem.lower().replace("_", "-")
    gpu = next((own for text, own in _GPUS.items() if text in name), "unknown")
    family = next((own for own in _FAMILIES if own in name), name)
    microbatches = re.search(r"nmb(\d+)", name)
    profile = PipelineProfile(classes, _BLOCKING_W.get(gpu, 75.0))
    return TrueTable(
        path.stem,
        gpu,
        family,
        int(microbatches.group(1)) if microbatches else 32,
        profile,
        _full_speed_clocks_mhz(profile),
    )


def formula_table(seed: int) -> TrueTable:
    """Return the table of a random pipeline; with odd seeds all stages share the deviations of single clocks."""
    job = random_job(seed)
    draw = np.random.default_rng([seed, 9])
    at_clock = {
        (rank, kind): np.exp(_SCATTER_RATIO * draw.standard_t(3, size=(len(job.clocks_mhz), 2)))
        for rank, kind in job.work
    }
    top = job.clocks_mhz[0]
    classes, full_speed_mhz = {}, {}
    for (rank, kind), work in job.work.items():
        off = at_clock[0 if seed % 2 else rank, kind]
        key = InstructionClass(rank, kind)
        options = []
        for clock, (slower, stronger) in zip(job.clocks_mhz, off.tolist(), strict=True):
            time_s = work.time_s(clock) * (slower if clock < top else 1.0)
            if clock >= LOWEST_RATIO * top:
                options.append(ClockOption(clock, time_s, time_s * work.power_w(clock) * stronger))
        classes[key] = instruction_profile(options, where=f"formula {seed}")
        full_speed_mhz[key] = work.actual_clock_mhz(top)
    profile = PipelineProfile(classes, job.profile().blocking_power_w)
    name = f"formula-{seed}-{job.model.key}"
    return TrueTable(name, job.model.model_name, "formula", job.schedule.num_microbatches, profile, full_speed_mhz)


def _full_speed_clocks_mhz(profile: PipelineProfile) -> dict[InstructionClass, float]:
    """Return the SM clock at full speed, which the tables lack: where times below a cap reach the time at the maximum.

    One per kind of instruction, as stages do equal work: single stages have too few clocks to show their own.
    """
    crossings: dict[InstructionKind, list[float]] = defaultdict(list)
    tops: dict[InstructionKind, float] = {}
    for key, own in profile.classes.items():
        top = own.at_max_clock
        tops[key.kind] = max(tops.get(key.kind, 0.0), float(top.sm_clock_mhz))
        low = [o for o in own.options if o.sm_clock_mhz <= _LOWER_PART * top.sm_clock_mhz]
        if len(low) >= 3:
            x = np.log([top.sm_clock_mhz / o.sm_clock_mhz for o in low])
            y = np.log([o.time_s / top.time_s for o in low])
            slope, offset = np.polyfit(x, y, 1)
            if slope > 0.2:
                crossings[key.kind].append(float(np.clip(-offset / slope, 0.0, _MAX_SPREAD)))
    return {key: tops[key.kind] * float(np.exp(-median(crossings.get(key.kind, [0.0])))) for key in profile.classes}
