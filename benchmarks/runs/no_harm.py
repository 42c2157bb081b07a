"""What the daemon costs whole programs, by the programs' own clocks: each one with and without the daemon, in pairs.

    python benchmarks/runs/no_harm.py [--pairs 4] [--only NAME ...] [--max-slowdown 0.02] [--busy 4] [--seed 1]
        [--steps-ratio 1] [--world kind] [--gpu-model h200] [--json]

The programs are those of benchmarks/programs, and of shared/cases/programs where that is beside the checkout: DDP
with a slow disk, FSDP2, a GAN, accumulation, reinforcement learning, pipelines, Megatron-core with tensor
parallelism, Hugging Face, Lightning and accelerate (`make frameworks`), each of 60 to 120 s. GPUs are simulated,
times are real. With the daemon, `gpuenergyd serve` runs with its default settings and no history, and `gpuenergyd
run` starts the program; without, the program runs alone. The order within pairs is ABBA.

A program writes a row for each step, with time, exact energy and loss; its time is the one between its first row and
its last. Compared with the limits is by how much it is longer, beyond an allowance for its begin: (with - without -
allowance) / without. The interval is Student's for the mean of the pairs, 95 %. A program whose interval lies wholly
above the limit fails, and so does one whose losses differ, that ends with an error, whose pauses run at lowered
clocks, or that leaves a clock lowered. Run it on a quiet host.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scipy.special import stdtrit

from docs.site.house_map import PYTHON_PATH
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_sim.driver.device_parameters import MODELS
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.framework_environments import ROOT, is_built, python_of

OWN = ROOT / "benchmarks" / "programs"
CASES = ROOT.parent / "shared" / "cases" / "programs"
GPU_MODEL = "a100-sxm"
QUIET_LIMIT_RATIO, BUSY_LIMIT_RATIO = 0.005, 0.01
"""Permitted in addition to the permitted slowdown, after the allowance."""
QUIET_ALLOWANCE_S, BUSY_ALLOWANCE_S = 1.0, 2.0
LEAST_STEPS = 4
_LEAST_PAUSE_RATIO = 0.01
MAX_LOWERED_RATIO = 0.1
"""Share of the works in pauses that may run at a lowered clock: until a gap that nothing marks is found."""
_CONFIDENCE = 0.95
_WAIT_LIMIT_S, _STOP_LIMIT_S = 60.0, 30.0
_RUN_LIMIT_S = 1200.0
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Program:
    """One training program; `framework` is the environment that it needs, None for that of this process."""

    name: str
    script: Path
    num_steps: int
    """Of 60 to 120 s."""
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    framework: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    steps_variable: str = "STEPS"


def own_programs() -> list[Program]:
    """Return the programs of the project."""
    loops, pipelines, frameworks = (OWN / f"{name}.py" for name in ("loops", "pipelines", "frameworks"))
    return [
        Program("ddp", loops, 180, ("ddp",), num_ranks=2),
        Program("fsdp2", loops, 300, ("fsdp2",), num_ranks=2),
        Program("gan", loops, 260, ("gan",)),
        Program("accumulation", loops, 190, ("accumulation",)),
        Program("rl", loops, 240, ("rl",)),
        Program("pipeline-1f1b", pipelines, 120, ("1F1B",), num_ranks=4),
        Program("pipeline-interleaved", pipelines, 120, ("Interleaved1F1B",), num_ranks=4),
        Program("megatron", OWN / "megatron_pipeline.py", 110, num_ranks=4, framework="megatron"),
        Program("huggingface", frameworks, 330, ("huggingface",), num_ranks=2, framework="huggingface"),
        Program("lightning", frameworks, 330, ("lightning",), num_ranks=2, framework="lightning"),
        Program("accelerate", frameworks, 330, ("accelerate",), num_ranks=2, framework="huggingface"),
    ]


def cases() -> list[Program]:
    """Return the programs beside the checkout, if there are any."""
    job = (("MODE", "job"),)
    found = [
        Program("case-ddp", CASES / "ddp.py", 140, num_ranks=2),
        Program("case-gan", CASES / "gan.py", 300),
        Program("case-gan-job", CASES / "gan.py", 300, variables=job),
        Program("case-gan-cold-job", CASES / "gan_cold.py", 220, variables=job),
        Program("case-titan-1f1b", CASES / "titan.py", 100, num_ranks=4),
        Program("case-titan-interleaved", CASES / "titan.py", 100, num_ranks=4,
                variables=(("SCHEDULE", "Interleaved1F1B"),)),
        Program("case-rl", CASES / "rl.py", 7, steps_variable="ROUNDS"),
    ]  # fmt: skip
    return [program for program in found if program.script.exists()]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all runs of a benchmark have in common."""

    max_slowdown_ratio: float = 0.0
    num_busy: int = 0
    seed: int = 1
    steps_ratio: float = 1.0
    kind: WorldKind = WorldKind.KIND
    gpu_model: str = GPU_MODEL

    @property
    def allowance_s(self) -> float:
        """Time that a program may be longer in any case."""
        return BUSY_ALLOWANCE_S if self.num_busy else QUIET_ALLOWANCE_S

    @property
    def limit_ratio(self) -> float:
        """Share of its time that a program may be longer beyond that."""
        return self.max_slowdown_ratio + (BUSY_LIMIT_RATIO if self.num_busy else QUIET_LIMIT_RATIO)

    @property
    def field_name(self) -> str:
        """Name of the result's main field."""
        slowdown = f"slowdown_{self.max_slowdown_ratio:g}_".replace(".", "_") if self.max_slowdown_ratio else ""
        return f"{'busy_' if self.num_busy else ''}{slowdown}longer_max_ratio"

    def num_steps(self, program: Program) -> int:
        """Return the length of a program."""
        return max(LEAST_STEPS, round(self.steps_ratio * program.num_steps))


@dataclass(frozen=True, slots=True)
class Run:
    """What a program has shown in one run."""

    time_s: float
    """From its first row to its last, of the rank with the longest."""
    steps_s: float
    """The same without what is between steps."""
    energy_j: float
    """Of the steps, all ranks."""
    losses: tuple[tuple[str | None, ...], ...]
    num_paused: int
    """Works in pauses, all ranks; 0 where the program does not count them."""
    num_lowered: int
    """Those of them that ended at a lowered clock."""
    problems: tuple[str, ...] = ()
    decisions: tuple["Decision", ...] = ()
    """Of each of its jobs, with the daemon."""


@dataclass(frozen=True, slots=True)
class Decision:
    """When the daemon first knew what to do for a job, and what came of it."""

    num_iterations: int | None
    """Iterations before the first plan, or before it knew that there is nothing to save; None if neither came."""
    outcome: str


def read_decisions(history: Path) -> tuple[Decision, ...]:
    """Return the decisions of all jobs in a history, by when they began."""
    with closing(sqlite3.connect(f"file:{history}?mode=ro", uri=True)) as connection:
        rows = connection.execute(_DECISIONS).fetchall()
    return tuple(Decision(num, f"{outcome}: {reason}") for num, outcome, reason in rows)


_DECISIONS = """
    SELECT (SELECT min(apply_at_iteration) FROM plans WHERE plans.job_id = jobs.job_id
            AND (purpose = 'tuned' OR reason LIKE 'nothing to save%')), outcome, outcome_reason
    FROM jobs ORDER BY started_at
"""


def read_rows(prefix: Path, num_ranks: int) -> Run:
    """Return what the rows of all ranks say; what is before the first row's end is the program's start.

    Raises:
        ValueError: a rank has written fewer than two rows.
    """
    ranks = []
    for index in range(num_ranks):
        path = prefix.with_name(f"{prefix.name}.{index}.jsonl")
        rows = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()] if path.exists() else []
        if len(rows) < 2:
            raise ValueError(f"rank {index} has written {len(rows)} rows; at least 2 are needed")
        ranks.append(rows)
    return Run(
        time_s=max(rows[-1]["t"] - rows[0]["t"] for rows in ranks),
        steps_s=max(math.fsum(row["dt"] for row in rows[1:]) for rows in ranks),
        energy_j=math.fsum(row["e"] for rows in ranks for row in rows[1:]),
        losses=tuple(tuple(row["loss"] for row in rows) for rows in ranks),
        num_paused=sum(row.get("paused", 0) for rows in ranks for row in rows),
        num_lowered=sum(row.get("lowered", 0) for rows in ranks for row in rows),
    )


@dataclass(slots=True)
class Pairs:
    """The pairs of one program: each run without the daemon, and the one with it."""

    without: list[Run] = field(default_factory=list)
    joined: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, without: Run, joined: Run) -> None:
        """Add a pair."""
        self.without.append(without)
        self.joined.append(joined)
        self.problems += [*without.problems, *joined.problems]
        if without.losses != joined.losses:
            self.problems.append("losses differ")

    def figures(self, conditions: Conditions) -> dict[str, Any]:
        """Return the figures of the program; without a pair, only its problems."""
        if not self.without:
            return {"n": 0, "is_met": False, "problems": self.problems}
        pairs = list(zip(self.without, self.joined, strict=True))
        ratios = [(b.time_s - a.time_s - conditions.allowance_s) / a.time_s for a, b in pairs]
        interval = mean_interval(ratios)
        return {
            "n": len(pairs),
            "without_s": statistics.median(run.time_s for run in self.without),
            "with_s": statistics.median(run.time_s for run in self.joined),
            "longer_ratio": statistics.median(ratios),
            "longer_mean_ratio": statistics.fmean(ratios),
            "longer_low_ratio": interval[0] if interval else None,
            "longer_high_ratio": interval[1] if interval else None,
            "longer_spread_ratio": statistics.stdev(ratios) if len(ratios) > 1 else None,
            "steps_longer_ratio": statistics.median(b.steps_s / a.steps_s - 1 for a, b in pairs),
            "pauses_longer_ratio": pauses_longer_ratio(pairs),
            "saved_ratio": statistics.median(1 - b.energy_j / a.energy_j for a, b in pairs),
            "paused": sum(run.num_paused for run in self.joined),
            "lowered_in_pauses": sum(run.num_lowered for run in self.joined),
            "is_met": not self.problems and (interval is None or interval[0] <= conditions.limit_ratio),
            "decisions": [asdict(decision) for run in self.joined for decision in run.decisions],
            "problems": self.problems,
        }


def pauses_longer_ratio(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    """Return by how much longer the time between steps is, median of the pairs; None where there is hardly any."""
    pauses_s = [(a.time_s - a.steps_s, b.time_s - b.steps_s) for a, b in pairs]
    if any(before_s < _LEAST_PAUSE_RATIO * a.time_s for (a, _), (before_s, _) in zip(pairs, pauses_s, strict=True)):
        return None
    return statistics.median(after_s / before_s - 1 for before_s, after_s in pauses_s)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    quantile = float(stdtrit(len(values) - 1, 0.5 + _CONFIDENCE / 2))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], help="names of programs")
    parser.add_argument("--max-slowdown", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside the programs")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the simulated GPUs, and of the order in the first pairs"
    )
    parser.add_argument("--steps-ratio", type=float, default=1.0, help="factor on the length of all programs")
    parser.add_argument("--world", choices=list(WorldKind), default=WorldKind.KIND)
    parser.add_argument("--gpu-model", choices=sorted(MODELS), default=GPU_MODEL)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"argument --pairs: {options.pairs} is below 1")
    known = {program.name: program for program in (*own_programs(), *cases())}
    for name in options.only:
        if name not in known:
            parser.error(f"argument --only: no program {name!r}; valid: {', '.join(known)}")
    conditions = Conditions(
        options.max_slowdown,
        options.busy,
        options.seed,
        options.steps_ratio,
        WorldKind(options.world),
        options.gpu_model,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # programs and daemons end with this one
    chosen = [known[name] for name in options.only or known]
    skipped = {program.name: reason for program in chosen if (reason := reason_to_skip(program))}
    found = {program.name: Pairs() for program in chosen if program.name not in skipped}
    with busy_processes(options.busy):
        for number in range(options.pairs):
            for program in chosen:
                if program.name in found:
                    add_pair(found[program.name], program, number, conditions)
    figures = summary({name: pairs.figures(conditions) for name, pairs in found.items()}, skipped, conditions)
    if options.json:
        print(json.dumps(figures))
    else:
        print_table(figures)
    return 0 if figures["is_met"] else 1


def reason_to_skip(program: Program) -> str:
    """Return why a program cannot run here; empty if it can."""
    if program.framework is not None and not is_built(program.framework):
        return f"no environment for {program.framework}; `make frameworks` builds one"
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def add_pair(pairs: Pairs, program: Program, number: int, conditions: Conditions) -> None:
    """Run a pair: without the daemon first in half of the pairs, in the order ABBA."""
    seed = f"{conditions.seed} {program.name}"
    is_joined_first = (random.Random(seed).random() < 0.5) != bool(number % 2)
    runs: dict[bool, Run] = {}
    try:
        for is_joined in (is_joined_first, not is_joined_first):
            runs[is_joined] = run_once(program, conditions, is_joined=is_joined)
            print(f"{program.name}, pair {number}, {'with' if is_joined else 'without'}:"
                  f" {runs[is_joined].time_s:.2f} s", file=sys.stderr, flush=True)  # fmt: skip
        pairs.add(runs[False], runs[True])
    except (OSError, ValueError, subprocess.SubprocessError, GpuEnergyError) as error:
        pairs.problems.append(f"pair {number}: {error}")
        print(f"{program.name}: {error}", file=sys.stderr, flush=True)


def run_once(program: Program, conditions: Conditions, *, is_joined: bool) -> Run:
    """Run a program on GPUs of its own, with a daemon of its own if it is joined."""
    with tempfile.TemporaryDirectory(prefix="harm-") as text:
        folder = Path(text)
        world = folder / "world"
        models = [conditions.gpu_model] * program.num_ranks
        host = SimulatedHost.create(world, models, seed=conditions.seed, kind=conditions.kind)
        uuids = [identity.gpu_uuid for identity in host.identities()]
        environ = environment_of(program, conditions, folder, uuids)
        decisions: tuple[Decision, ...] = ()
        try:
            if is_joined:
                with serving(folder, world):
                    status = train(program, environ, folder, launcher_of(conditions))
                    _wait_until(lambda: not _locked(host))  # before the daemon ends, which restores all in any case
                    locked = _locked(host)
                decisions = read_decisions(folder / "state" / "history.sqlite3")
            else:
                status = train(program, environ, folder, ())
                locked = _locked(host)
        finally:
            host.close()
        problems = [f"exit status {status}"] if status else []
        problems += [f"{path.name} has a traceback" for path in folder.glob("*.log") if _TRACEBACK in _text(path)]
        problems += [f"GPU {uuid} is left with a clock lock" for uuid in locked]
        run = read_rows(folder / "rows", program.num_ranks)
        if run.num_lowered > MAX_LOWERED_RATIO * run.num_paused:
            problems.append(f"{run.num_lowered} of {run.num_paused} works in pauses ran at a lowered clock")
        for path in sorted(folder.glob("*.log")) if problems else ():
            print(f"{path.name}:\n{_text(path)[-4000:]}", file=sys.stderr, flush=True)
        return replace(run, problems=tuple(problems), decisions=decisions)


def environment_of(program: Program, conditions: Conditions, folder: Path, uuids: Sequence[str]) -> Mapping[str, str]:
    """Return the environment of a program, the same with and without the daemon."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")},
        "PYTHONPATH": PYTHON_PATH,
        "CASE_WORLD": str(folder / "world"),
        "CASE_OUT": str(folder / "rows"),
        "GPUENERGYD_GPU_UUID": ",".join(uuids),
        "GPUENERGYD_SOCKET": str(folder / "run" / "gpuenergyd.sock"),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        **dict(program.variables),
        program.steps_variable: f"{conditions.num_steps(program)}",
    }


def launcher_of(conditions: Conditions) -> tuple[str, ...]:
    """Return the command that starts a program under the daemon."""
    own = (*_GPUENERGYD, "run")
    slowdown = conditions.max_slowdown_ratio
    return (*own, "--max-slowdown", f"{slowdown:g}", "--") if slowdown else (*own, "--")


_GPUENERGYD = (sys.executable, "-c", "from gpuenergyd.cli.main import main; main()")


def train(program: Program, environ: Mapping[str, str], folder: Path, launcher: Sequence[str]) -> int:
    """Run a program to its end; return its exit status."""
    python = sys.executable if program.framework is None else str(python_of(program.framework))
    ranks: tuple[str, ...] = ()
    if program.num_ranks > 1:
        ranks = ("-m", "torch.distributed.run", "--nproc-per-node", f"{program.num_ranks}", "--master-addr",
                 "127.0.0.1", "--master-port", f"{_free_port()}")  # fmt: skip
    command = [*launcher, python, *ranks, str(program.script), *program.arguments]
    with (folder / "program.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(_RUN_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def serving(folder: Path, world: Path) -> Iterator[None]:
    """Run `gpuenergyd serve` with its default settings for the duration of a block."""
    (folder / "run").mkdir()
    paths = ("--world", str(world), "--runtime-dir", str(folder / "run"), "--state-dir", str(folder / "state"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    with (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [*_GPUENERGYD, "serve", "--driver", "simulated", *paths],
            env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_ready(process, folder)
            yield
            process.terminate()
            if status := process.wait(_STOP_LIMIT_S):
                raise ValueError(f"the daemon ended with exit status {status}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    client = DaemonClient(str(folder / "run" / "gpuenergyd.sock"))

    def is_ready() -> bool:
        try:
            return process.poll() is not None or bool(client.get_status()["worker"]["is_alive"])
        except GpuEnergyError:
            return False

    is_in_time = _wait_until(is_ready)
    client.close()
    if not is_in_time or process.poll() is not None:
        raise ValueError(f"the daemon did not start: {_text(folder / 'daemon.log')[-1000:]}")


def _wait_until(predicate: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _WAIT_LIMIT_S
    while not (is_met := predicate()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return is_met


def _locked(host: SimulatedHost) -> list[str]:
    uuids = (identity.gpu_uuid for identity in host.identities())
    return [uuid for uuid in uuids if host.locked_sm_clock_mhz(uuid) is not None]


@contextmanager
def busy_processes(num: int) -> Iterator[None]:
    """Keep so many processes busy for the duration of a block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def summary(
    by_program: Mapping[str, dict[str, Any]], skipped: Mapping[str, str], conditions: Conditions
) -> dict[str, Any]:
    """Return the figures of all programs."""
    longer = [own["longer_ratio"] for own in by_program.values() if own["n"]]
    return {
        conditions.field_name: max(longer, default=None),
        "longer_by_program": dict(by_program),
        "limit_ratio": conditions.limit_ratio,
        "allowance_s": conditions.allowance_s,
        "max_slowdown_ratio": conditions.max_slowdown_ratio,
        "busy_processes": conditions.num_busy,
        "interval": "Student's for the mean of the pairs, 95 %",
        "skipped": dict(skipped),
        "is_met": bool(longer) and all(own["is_met"] for own in by_program.values()),
    }


def print_table(figures: Mapping[str, Any]) -> None:
    """Print a row for each program."""
    print(
        f"{'program':<24}{'n':>3}{'without':>10}{'with':>10}{'longer':>9}  {'95 % interval':<18}{'saved':>7}  problems"
    )
    for name, own in figures["longer_by_program"].items():
        if not own["n"]:
            print(f"{name:<24}{0:>3}{'; '.join(own['problems'])}")
            continue
        low, high = own["longer_low_ratio"], own["longer_high_ratio"]
        interval = "-" if low is None else f"{100 * low:+.2f} to {100 * high:+.2f}"
        problems = "; ".join(dict.fromkeys(own["problems"])) or ("" if own["is_met"] else "longer than permitted")
        print(
            f"{name:<24}{own['n']:>3}{own['without_s']:>9.2f}s{own['with_s']:>9.2f}s{100 * own['longer_ratio']:>+8.2f}%"
            f"  {interval:<18}{100 * own['saved_ratio']:>+6.1f}%  {problems}"
        )
    for name, reason in figures["skipped"].items():
        print(f"{name:<24}not run: {reason}")
    print(
        f"longer: beyond {figures['allowance_s']:g} s, median of the pairs; at most"
        f" {100 * figures['limit_ratio']:g} % is permitted. Interval: {figures['interval']}."
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
