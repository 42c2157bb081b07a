"""The benchmarks with their arguments and time limits; a new benchmark needs a line here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.errors import UsageError


class Kind(StrEnum):
    """How load on the machine affects the figures."""

    COMPUTED = "computed"
    """Not affected by load, or CPU time of one thread: two may run at once."""
    TIMED = "timed"
    """Wall-clock latencies and costs: runs alone."""


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark of `make bench`."""

    name: str
    script: str
    """A file in benchmarks/runs/."""
    arguments: tuple[str, ...]
    short_arguments: tuple[str, ...]
    """Arguments of a short trial run of seconds, without meaningful figures."""
    quiet_s: float
    """The duration on two idle cores; for a computed benchmark, beside another one."""
    limit_s: float
    """The time limit, for a machine several times slower."""
    kind: Kind = Kind.TIMED
    is_usual: bool = True
    """Whether `make bench` runs it without being asked for it; the others take longer."""
    has_target: bool = True
    """Whether it fails if its figures miss a target; the others only show what they are."""
    data: tuple[str, ...] = field(default=())
    """The folders in shared/data beside the checkout that it requires."""

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
    Run("emulated-budgets", "emulated_budgets.py", _args("--json"), _args("--json --gpus a100-sxm"), 50, 900,
        Kind.COMPUTED, is_usual=False, data=("profiles",)),
    Run("profiling", "profiling.py", _args("--jobs 54 --seed 2931 --json"), _args("--jobs 2 --intervals 2 --json"),
        1800, 7200, Kind.COMPUTED, is_usual=False),
    Run("learning", "learning.py", _args("--jobs 32 --seed 6124 --json"),
        _args("--jobs 1 --replans 1 --json"), 200, 3600, Kind.COMPUTED, is_usual=False, data=("profiles",)),
    Run("learning-unknown-gpu", "learning.py", _args("--jobs 32 --seed 2931 --unknown-gpu --replans 8 --json"),
        _args("--jobs 1 --replans 1 --unknown-gpu --json"), 500, 3600, Kind.COMPUTED, is_usual=False,
        data=("profiles",)),
    Run("learning-uneven-stages", "learning.py", _args("--jobs 32 --seed 2931 --stage-spread 0.04 --json"),
        _args("--jobs 1 --replans 1 --stage-spread 0.04 --json"), 450, 3600, Kind.COMPUTED, is_usual=False,
        data=("profiles",)),
    Run("learning-ablation", "learning_ablation.py", _args("--jobs 12 --seed 61 --json"),
        _args("--jobs 2 --replans 1 --json"), 400, 5400, Kind.COMPUTED, is_usual=False,
        has_target=False, data=("profiles",)),
    Run("past-jobs", "past_jobs.py", _args("--pairs 40 --seed 17 --json"),
        _args("--pairs 2 --without-poison --json"), 900, 5400, Kind.COMPUTED, is_usual=False, data=("profiles",)),
    Run("soak", "soak.py", _args("--hours 2 --warmup-hours 2 --json"),
        _args("--hours 0.1 --warmup-hours 0.05 --json"), 290, 1200, Kind.COMPUTED),
    Run("planner-instances", "planner_instances.py", _args("--json"), _args("--json"), 40, 600, Kind.COMPUTED,
        has_target=False, data=("instances",)),
    Run("orders", "orders.py", _args("--json"), _args("--short --json"), 330, 1500, Kind.COMPUTED, is_usual=False,
        data=("profiles",)),
    Run("swing", "swing.py", _args("--json"), _args("--short --json"), 120, 1800, Kind.COMPUTED, is_usual=False,
        data=("profiles", "instances")),
    Run("power-cap", "power_cap.py", _args("--json"), _args("--short --json"), 110, 900, Kind.COMPUTED, is_usual=False,
        data=("profiles", "instances")),
    Run("power-budget", "power_budget.py", _args("--seed 1 --json"), _args("--hosts 1 --json"), 60, 2400,
        Kind.COMPUTED, is_usual=False, data=("profiles",)),
    Run("grid-event", "grid_event.py", _args("--seeds 2 --json"), _args("--seeds 1 --short --json"), 400, 5400,
        Kind.COMPUTED, is_usual=False, data=("profiles",)),
    Run("claims", "claims.py", _args("--json"), _args("--jobs 11 --iterations 60 --json"), 1500, 5400, Kind.COMPUTED,
        is_usual=False),
    Run("claims-h200", "claims.py", _args("--gpu-model h200 --jobs 990 --seed 52431 --json"),
        _args("--gpu-model h200 --jobs 3 --iterations 60 --json"), 300, 9000, Kind.COMPUTED, is_usual=False),
    Run("proofs", "proofs.py", _args("--json"), _args("--runs 3 --json"), 120, 1800, Kind.COMPUTED, is_usual=False),
    Run("clean-check", "clean_check.py", _args("--json"), _args("--proofs 1 --json"), 180, 1800, Kind.COMPUTED,
        is_usual=False),
    Run("replay-insitu", "replay_insitu.py", _args("--json"), _args("--short --json"), 30, 900, Kind.COMPUTED,
        is_usual=False, data=("profiles",)),
    Run("reorder", "reorder.py", _args("--json"),
        _args("--iterations 60 --advised-iterations 50 --duration-scale 0.3 --expensive-from 50 --json"), 700, 2400,
        is_usual=False),
    Run("cost-policy", "cost_policy.py", _args("--seeds 3 --json"), _args("--seeds 1 --short --json"), 55, 600,
        Kind.COMPUTED, data=("gpu",)),
    Run("advice", "advice.py", _args("--json"), _args("--jobs 1 --phase-jobs 0 --json"), 90, 900, Kind.COMPUTED),
    Run("advice-h200", "advice.py", _args("--gpu-model h200 --jobs 12 --seed 95101 --json"),
        _args("--gpu-model h200 --jobs 1 --json"), 400, 3600, Kind.COMPUTED, is_usual=False),
    Run("carbon", "carbon.py", _args("--json"), _args("--json --zones GB,DE --starts 12"), 100, 600, Kind.COMPUTED,
        data=("carbon", "instances")),
    Run("carbon-first-day", "carbon_first_day.py", _args("--json"), _args("--zones GB --every-days 120 --json"), 90,
        3600, Kind.COMPUTED, is_usual=False, data=("carbon",)),
    Run("carbon-published", "carbon_published.py", _args("--json"), _args("--json"), 300, 3600,
        Kind.COMPUTED, is_usual=False, data=("carbon",)),
    Run("carbon-interval", "carbon_interval.py", _args("--json"), _args("--json"), 300, 3600,
        Kind.COMPUTED, is_usual=False, data=("carbon",)),
    Run("device-model", "device_model.py", _args("--json"), _args("--json"), 5, 120, Kind.COMPUTED, has_target=False,
        data=("gpu",)),
    Run("client-cost", "client_cost.py", _args("--rounds 200 --json"), _args("--rounds 10 --json"), 3, 300),
    Run("host-bound", "host_bound.py", _args("--json"),
        _args("--pairs 1 --only observe --programs loop --json"), 1400, 2600, is_usual=False),
    Run("overhead", "overhead.py", _args("--pairs 20 --json"), _args("--pairs 3 --steps 2 --json"), 240, 900,
        has_target=False),
    Run("adapter-overhead", "adapter_overhead.py", _args("--json"),
        _args("--pairs 1 --steps 2 --only loop torch-pipelining --json"), 900, 3600, is_usual=False),
    Run("startup", "startup.py", _args("--json"), _args("--runs 1 --json"), 50, 400),
    Run("kill-matrix", "kill_matrix.py", _args("--trials 150 --seed 5 --json"), _args("--trials 6 --json"), 130, 900),
    Run("systemd-faults", "systemd_faults.py", _args("--rounds 2 --json"), _args("--rounds 1 --json"), 60, 400),
    Run("two-hosts", "two_hosts.py", _args("--json"), _args("--episodes 1 --json"), 700, 2400,
        is_usual=False),
    Run("stragglers", "stragglers.py", _args("--json"), _args("--seeds 1 --json"), 900, 3600, Kind.COMPUTED,
        is_usual=False),
    Run("plain-loops", "plain_loops.py", _args("--repeats 3 --json"), _args("--loops ddp --iterations 30 --json"), 2900,
        6000, is_usual=False),
    Run("plain-loops-h200", "plain_loops_virtual.py", _args("--gpu-model h200 --seeds 6 --first-seed 94400 --json"),
        _args("--gpu-model h200 --seeds 1 --json"), 150, 3600, Kind.COMPUTED, is_usual=False),
    Run("loop-stragglers", "loop_stragglers.py", _args("--json"), _args("--episodes 1 --steps 4 --json"), 290, 1500,
        is_usual=False),
    Run("run-ahead", "run_ahead.py", _args("--json"), _args("--depths 0 1 --rounds 1 --iterations 20 --json"), 3000,
        6000, is_usual=False),
    Run("captured", "captured.py", _args("--json"), _args("--jobs 1 --iterations 60 --json"), 150, 900, Kind.COMPUTED,
        is_usual=False),
    Run("slow-reads", "slow_reads.py", _args("--json"),
        _args("--gpus 2 --reads-ms 5 --periods-ms 1 --json"), 400, 2400, Kind.COMPUTED),
    Run("call-price", "call_price.py", _args("--json"),
        _args("--stalls-ms 3 --scales 1.0 --json"), 420, 1800, Kind.COMPUTED,
        is_usual=False),
    Run("latency-tails", "latency_tails.py", _args("--json"), _args("--kinds a100-like --jobs 1 --json"), 400, 1800,
        Kind.COMPUTED, is_usual=False),
    Run("everything-unkind", "everything_unkind.py", _args("--seed 6022 --json"),
        _args("--jobs 2 --processes 1 --json"), 1200, 4800, Kind.COMPUTED, is_usual=False),
    Run("everything-unkind-h200", "everything_unkind.py", _args("--gpu-model h200 --seed 52424 --json"),
        _args("--gpu-model h200 --jobs 1 --processes 1 --json"), 1200, 4800, Kind.COMPUTED, is_usual=False),
    Run("large-job", "large_job.py", _args("--json"),
        _args("--pp 4 --tp 2 --dp 2 --microbatches 8 --json"), 1500, 5400, Kind.COMPUTED, is_usual=False),
    Run("layouts", "layouts.py", _args("--json"), _args("--iterations 60 --scale 1 --json"), 1200, 4800,
        is_usual=False),
    Run("sampling-cost", "sampling_cost.py", _args("--json"), _args("--seconds 2 --learning-seconds 3 --json"),
        110, 400),
    Run("sampling-h200", "sampling_h200.py", _args("--json"),
        _args("--gpus 2 --seconds 4 --learning-seconds 6 --json"), 75, 200),
    Run("hanging-call", "hanging_call.py", _args("--json"), _args("--seconds 12 --json"), 16, 120),
    Run("load", "load.py", _args("--json"), _args("--seconds 10 --json"), 120, 400),
    Run("store", "store.py", _args("--days 7 --live-seconds 30 --json"),
        _args("--days 1 --repeats 2 --live-seconds 5 --json"), 80, 600, has_target=False),
    Run("fleet", "fleet.py", _args("--json"),
        _args("--hosts 20 --write-seconds 12 --burst-seconds 3 --scrape-seconds 35 --json"), 200, 900,
        has_target=False),
    Run("real-gpu", "real_gpu.py", _args("--json"), _args("--json"), 5, 300),
    Run("gpu-pipeline", "gpu_pipeline.py", _args("--json"), _args("--json"), 5, 600),
    Run("real-programs", "real_programs.py", _args("--times 10 --load --json"),
        _args("--times 1 --steps 30 --only manual --json"), 1500, 4800, is_usual=False),
    Run("no-harm", "no_harm.py", _args("--json"), _args("--pairs 1 --steps-ratio 0.02 --only gan --json"), 17_000,
        40_000, is_usual=False),
    Run("no-harm-busy", "no_harm.py", _args("--busy 4 --json"),
        _args("--busy 4 --pairs 1 --steps-ratio 0.02 --only gan --json"), 20_000, 50_000, is_usual=False),
    Run("no-harm-slowdown", "no_harm.py", _args("--max-slowdown 0.02 --json"),
        _args("--max-slowdown 0.02 --pairs 1 --steps-ratio 0.02 --only gan --json"), 17_000, 40_000, is_usual=False),
    Run("schedules", "schedules.py", _args("--rounds 1 --json"),
        _args("--rounds 1 --block 4 --only 1f1b --duration-scale 0.5 --json"), 960, 1800),
    Run("schedules-h200", "schedules_virtual.py",
        _args("--gpu-model h200 --seed 94301 --rounds 1 --json"),
        _args("--gpu-model h200 --rounds 1 --block 4 --only 1f1b --duration-scale 0.5 --json"), 430, 3600,
        Kind.COMPUTED, is_usual=False),
    Run("planner-long", "planner_against_lowtime.py", _args("--instance-budget-s 330"),
        _args("--instance-budget-s 1 --only s4m8_1f1b_a100"), 2400, 7200, Kind.COMPUTED, is_usual=False,
        data=("instances",)),
    Run("kill-matrix-limits", "kill_matrix.py",
        _args("--trials 150 --seed 5 --lever power-limits --policy cost --json"),
        _args("--trials 6 --lever power-limits --policy cost --json"), 130, 900, is_usual=False),
    Run("kill-matrix-budget", "kill_matrix.py", _args("--trials 150 --seed 5 --power-budget-w 450 --json"),
        _args("--trials 6 --power-budget-w 450 --json"), 130, 900, is_usual=False),
    Run("kill-matrix-commands", "kill_matrix.py", _args("--trials 1000 --seed 5 --commands --hosts 4 --json"),
        _args("--trials 6 --commands --json"), 1200, 7200, is_usual=False),
    Run("kill-matrix-long", "kill_matrix.py", _args("--trials 1000 --seed 5 --json"), _args("--trials 6 --json"),
        1500, 3600, is_usual=False),
    Run("idle-week", "idle_week.py", _args("--seed 7101 --json"), _args("--seed 1 --days 1 --json"), 300, 1800,
        Kind.COMPUTED, is_usual=False),
    Run("idle-cpu", "idle_cpu.py", _args("--json"), _args("--gpus 2 --seconds 4 --learning-seconds 2 --json"), 240,
        900, is_usual=False),
    Run("idle-kills", "idle_kills.py", _args("--trials 300 --seed 26 --json"), _args("--trials 5 --json"),
        1800, 7200, is_usual=False),
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
    Run("demo-agreement", "demo_agreement.py", _args("--demos 10 --load 2 --json"),
        _args("--demos 1 --load 0 --json"), 1500, 5400, is_usual=False),
    Run("floods", "load.py", _args("--compare --json"), _args("--compare --flood requests --seconds 3 --json"), 390,
        1200, is_usual=False),
    Run("route-floods", "route_floods.py", _args("--json"), _args("--seconds 3 --ranks 4 --json"), 60, 300),
)  # fmt: skip

PARTS = {
    "compiled_events.py": "events that cost what CUDA's cost, for host_bound.py",
    "carbon_prior.py": "fits the shipped forecast prior, and priors without one zone; measures nothing",
    "drawn_hosts.py": "draws the hosts with pipelines and loops of power_budget.py and grid_event.py",
    "daemon_instruments.py": "instruments that load.py adds to the daemon",
    "fleet_history.py": "generates the history of a fleet in the server",
    "fleet_hosts.py": "the records of one simulated host of the fleet",
    "fleet_postgresql.py": "the PostgreSQL part of fleet.py",
    "fleet_prometheus.py": "the Prometheus part of fleet.py",
    "paired_steps.py": "blocks with an adapter on and off, for overhead.py, adapter_overhead.py, host_bound.py",
    "insitu_model.py": "the model of one published iteration in replay_insitu.py",
    "learning_options.py": "options that learning.py, learning_ablation.py and past_jobs.py share",
    "insitu_plans.py": "reads the clocks of the published plans for replay_insitu.py",
    "late_clocks.py": "the table of late clocks in planner.py",
    "lowtime_rival.py": "runs lowtime for planner.py and planner_against_lowtime.py",
    "schedule_bounds.py": "computes the bounds that schedules.py prints",
    "virtual_place.py": "daemons and ranks of schedules_virtual.py",
}
"""Files in benchmarks/runs/ that are not benchmarks themselves."""


def chosen_runs(names: Sequence[str]) -> Iterator[Run]:
    """Yield the named runs or the usual ones: computed ones, longest first, then timed ones, longest last.

    Raises:
        UsageError: unknown name.
    """
    known = {run.name: run for run in RUNS}
    for name in names:
        if name not in known:
            raise UsageError(f"no benchmark {name!r}; valid: {', '.join(sorted(known))}")
    chosen = [known[name] for name in names] if names else [run for run in RUNS if run.is_usual]
    computed = [run for run in chosen if run.kind is Kind.COMPUTED]
    yield from sorted(computed, key=lambda run: -run.quiet_s)
    yield from sorted((run for run in chosen if run.kind is Kind.TIMED), key=lambda run: run.quiet_s)
