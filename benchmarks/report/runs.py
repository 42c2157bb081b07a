"""Which benchmarks are run, with which arguments and for how long; add a line here for a new one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.errors import UsageError


class Kind(StrEnum):
    """What other work on the machine does to the figures."""

    COMPUTED = "computed"
    """Figures that load does not change, or CPU time of one thread: two may run at once."""
    TIMED = "timed"
    """Latencies and costs on a wall clock: runs alone."""


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark as `make bench` runs it."""

    name: str
    script: str
    """A file of benchmarks/runs/."""
    arguments: tuple[str, ...]
    short_arguments: tuple[str, ...]
    """For trying the whole: seconds instead of minutes, figures that say little."""
    quiet_s: float
    """What it takes on two cores that do nothing else; a computed one beside another computed one."""
    limit_s: float
    """For a machine several times as slow."""
    kind: Kind = Kind.TIMED
    is_usual: bool = True
    """Part of a plain `make bench`; the others are longer and run by name only."""
    data: tuple[str, ...] = field(default=())
    """Folders beside the checkout, under shared/data, without which its figures would be of something else."""

    def command(self, *, is_short: bool) -> tuple[str, ...]:
        """Return the command without the interpreter."""
        return (f"benchmarks/runs/{self.script}", *(self.short_arguments if is_short else self.arguments))


def _args(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RUNS = (
    Run("planner", "planner.py", _args("--lowtime-budget-s 40 --instance-budget-s 20"),
        _args("--lowtime-budget-s 1 --instance-budget-s 1"), 410, 1500, Kind.COMPUTED, data=("profiles", "instances")),
    Run("emulation", "emulation.py", _args("--json"),
        _args("--json --gpus a100-sxm --microbatches 12 --traces none"), 180, 1500, Kind.COMPUTED,
        data=("profiles", "carbon")),
    Run("profiling", "profiling.py", _args("--jobs 54 --seed 1 --json"), _args("--jobs 2 --intervals 2 --json"),
        300, 1200, Kind.COMPUTED),
    Run("soak", "soak.py", _args("--hours 2 --warmup-hours 2 --json"),
        _args("--hours 0.1 --warmup-hours 0.05 --json"), 290, 1200, Kind.COMPUTED),
    Run("planner-instances", "planner_instances.py", _args("--json"), _args("--json"), 40, 600, Kind.COMPUTED,
        data=("instances",)),
    Run("profiling-tables", "profiling_tables.py", _args("--json"), _args("--clocks 5 --json"), 30, 600, Kind.COMPUTED,
        data=("profiles", "gpu")),
    Run("carbon", "carbon.py", _args("--json"), _args("--json --zones GB,DE --starts 12"), 100, 600, Kind.COMPUTED,
        data=("carbon", "instances")),
    Run("device-model", "device_model.py", _args("--json"), _args("--json"), 5, 120, Kind.COMPUTED, data=("gpu",)),
    Run("client-cost", "client_cost.py", _args("--rounds 200 --json"), _args("--rounds 10 --json"), 3, 300),
    Run("overhead", "overhead.py", _args("--pairs 20 --json"), _args("--pairs 3 --steps 2 --json"), 240, 900),
    Run("framework-overhead", "framework_overhead.py", _args("--json"), _args("--repeats 1 --json"), 25, 300),
    Run("kill-matrix", "kill_matrix.py", _args("--trials 150 --seed 5 --json"), _args("--trials 6 --json"), 130, 900),
    Run("systemd-faults", "systemd_faults.py", _args("--rounds 2 --json"), _args("--rounds 1 --json"), 60, 400),
    Run("two-hosts", "two_hosts.py", _args("--json"), _args("--episodes 1 --json"), 230, 900),
    Run("sampling-cost", "sampling_cost.py", _args("--json"), _args("--seconds 2 --json"), 45, 300),
    Run("hanging-call", "hanging_call.py", _args("--json"), _args("--seconds 12 --json"), 16, 120),
    Run("load", "load.py", _args("--json"), _args("--seconds 10 --json"), 120, 400),
    Run("store", "store.py", _args("--days 7 --live-seconds 30 --json"),
        _args("--days 1 --repeats 2 --live-seconds 5 --json"), 80, 600),
    Run("fleet", "fleet.py", _args("--json"),
        _args("--hosts 20 --write-seconds 12 --burst-seconds 3 --scrape-seconds 35 --json"), 200, 900),
    Run("real-gpu", "real_gpu.py", _args("--json"), _args("--json"), 5, 300),
    Run("gpu-pipeline", "gpu_pipeline.py", _args("--json"), _args("--json"), 5, 600),
    Run("schedules", "schedules.py", _args("--rounds 1 --json"),
        _args("--rounds 1 --block 4 --only 1f1b --duration-scale 0.5 --json"), 960, 1800),
    Run("planner-long", "planner_against_lowtime.py", _args("--instance-budget-s 330"),
        _args("--instance-budget-s 1 --only s4m8_1f1b_a100"), 2400, 7200, Kind.COMPUTED, is_usual=False,
        data=("instances",)),
    Run("kill-matrix-long", "kill_matrix.py", _args("--trials 1000 --seed 5 --json"), _args("--trials 6 --json"),
        1500, 3600, is_usual=False),
    Run("store-long", "store.py", _args("--days 30 --json"), _args("--days 1 --repeats 2 --live-seconds 5 --json"),
        150, 3600, is_usual=False),
    Run("soak-long", "soak.py", _args("--hours 8 --warmup-hours 2 --json"),
        _args("--hours 0.1 --warmup-hours 0.05 --json"), 720, 7200, Kind.COMPUTED, is_usual=False),
    Run("line-coverage", "line_coverage.py", _args("--json"), _args("--json tests/core"), 1800, 3600, Kind.COMPUTED,
        is_usual=False),
    Run("mutation", "mutation.py", _args("--sample 200 --seed 1 --json"),
        _args("--sample 3 --only core --json"), 3600, 7200, Kind.COMPUTED, is_usual=False),
    Run("fleet-long", "fleet.py",
        _args("--write-seconds 300 --burst-seconds 30 --days 3 --scrape-seconds 600 --whole-writers 8 --json"),
        _args("--hosts 20 --write-seconds 12 --burst-seconds 3 --scrape-seconds 35 --json"), 1500, 3600,
        is_usual=False),
    Run("floods", "load.py", _args("--compare --json"), _args("--compare --flood requests --seconds 3 --json"), 390,
        1200, is_usual=False),
)  # fmt: skip

PARTS = {
    "carbon_prior.py": "fits the forecast prior that ships, and priors that leave a zone out; measures nothing",
    "daemon_instruments.py": "what load.py puts into the core",
    "fleet_history.py": "a fleet's history, made by the server",
    "fleet_hosts.py": "what one host of the fleet records",
    "fleet_postgresql.py": "PostgreSQL's part of fleet.py",
    "fleet_prometheus.py": "Prometheus' part of fleet.py",
    "late_clocks.py": "planner.py's table of clocks that come late",
    "lowtime_rival.py": "how planner.py and planner_against_lowtime.py run lowtime",
    "schedule_bounds.py": "the bounds that schedules.py prints",
}
"""Files of benchmarks/runs/ that are no benchmark themselves."""


def chosen_runs(names: Sequence[str]) -> Iterator[Run]:
    """Yield the usual runs, or those of these names: computed ones, longest first, then timed ones, longest last.

    Raises:
        UsageError: no run has such a name.
    """
    known = {run.name: run for run in RUNS}
    for name in names:
        if name not in known:
            raise UsageError(f"no benchmark {name!r}; there are: {', '.join(sorted(known))}")
    chosen = [known[name] for name in names] if names else [run for run in RUNS if run.is_usual]
    computed = [run for run in chosen if run.kind is Kind.COMPUTED]
    yield from sorted(computed, key=lambda run: -run.quiet_s)
    yield from sorted((run for run in chosen if run.kind is Kind.TIMED), key=lambda run: run.quiet_s)
