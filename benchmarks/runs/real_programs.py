"""Runs the examples and pipelines of the public tutorial's shape on a loaded host: failures, plans and reasons.

    python benchmarks/runs/real_programs.py [--times 10] [--load] [--steps 100] [--only NAME ...] [--json]

Every program trains a small model with real CPU times, which scatter as on any host, while the daemon controls
simulated GPUs, which are idle: nothing can be saved, and much can go wrong. With --load a busy process runs on every
core. Counted are jobs whose policy failed, tracebacks in the output of the programs and in the daemon's log, and the
outcomes: each job ends with a plan or with one reason. Needs the checkout, and `make frameworks` for two of the
examples.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.house_map import PYTHON_PATH
from gpuenergyd.store import open_history
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.framework_environments import ROOT, is_built, python_of
from tests.support.waiting import wait_until
from tests.trainers.forked_programs import run_forked

for _module in (
    "torch._dynamo",
    "torch.export",
    "torch.distributed.pipelining",
    "gpuenergyd_trainers.torch_pipelining",
):
    importlib.import_module(_module)  # once, not in every rank

TUTORIAL = ROOT / "tests" / "support" / "pipelining_tutorial.py"
LIMIT_S = 600.0
_AT_ONCE = 2
"""Programs that run beside each other."""
_PASS = 2
"""Runs of one program before it is the next one's turn."""
_TRACEBACK = "Traceback (most recent call last)"
_POLICY_FAILURE = re.compile(r"^policy \S+ (failed|returned an invalid)")


@dataclass(frozen=True, slots=True)
class Program:
    """One training program; `framework` is the environment that it needs, None for that of this process."""

    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    framework: str | None = None


@dataclass(slots=True)
class Counts:
    """The counts over all runs of one program."""

    runs: int = 0
    failed_runs: int = 0
    """Runs that a program ended with an error."""
    jobs: int = 0
    policy_failures: int = 0
    """Jobs whose policy raised, timed out, or returned an invalid answer."""
    tracebacks: int = 0
    with_plan: int = 0
    """Jobs that ran under a plan."""
    without_outcome: int = 0
    """Jobs that ended with neither a plan nor a reason."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Outcomes of the jobs, numbers left out."""


def programs() -> list[Program]:
    """Return all programs."""
    found = [
        Program("example: gpt_pipeline", ROOT / "examples" / "gpt_pipeline.py", num_ranks=2),
        Program("example: ddp_images", ROOT / "examples" / "ddp_images.py", num_ranks=2),
        Program("example: huggingface_gpt2", ROOT / "examples" / "huggingface_gpt2.py", framework="huggingface"),
        Program("example: lightning_images", ROOT / "examples" / "lightning_images.py", framework="lightning"),
    ]
    for split in ("manual", "traced"):
        for schedule in ("gpipe", "1f1b"):
            for num_ranks in (2, 4):
                name = f"tutorial: {split} split, {schedule}, {num_ranks} ranks"
                found.append(Program(name, TUTORIAL, ("--split", split, "--schedule", schedule), num_ranks))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--load", action="store_true", help="keep every core busy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=75.0, help="no run begins later")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of programs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [own for own in programs() if not options.only or any(part in own.name for part in options.only)]
    found = {program.name: Counts() for program in chosen}
    until_s = time.monotonic() + 60 * options.minutes
    with busy_cores() if options.load else _idle():
        for passed in range(0, options.times, _PASS):
            for program in chosen:
                if time.monotonic() < until_s and (program.framework is None or is_built(program.framework)):
                    times = min(_PASS, options.times - passed)
                    count(found[program.name], program, times=times, num_steps=options.steps, until_s=until_s)
                    print(f"{program.name}: {found[program.name]}", file=sys.stderr, flush=True)
    is_met = all(is_good(counts) for counts in found.values())
    figures = {
        "is_loaded": options.load,
        "times": options.times,
        "steps": options.steps,
        "programs": {name: _row(counts) for name, counts in found.items()},
    }
    if options.json:
        print(json.dumps(figures))
    return 0 if is_met else 1


def is_good(counts: Counts) -> bool:
    """Return whether nothing failed and every job ended with a plan or a reason."""
    bad = (counts.failed_runs, counts.policy_failures, counts.tracebacks, counts.without_outcome)
    return not any(bad) and counts.jobs > 0


def count(counts: Counts, program: Program, *, times: int, num_steps: int, until_s: float) -> None:
    """Run one program several times under one daemon, and add to its counts; no run begins after `until_s`."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with running_daemon(folder / "daemon", warmup_iterations=2, baseline_iterations=10) as daemon:
            gpu_uuids = [gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]]
            at_once = max(1, min(_AT_ONCE, len(gpu_uuids) // program.num_ranks))
            running: dict[int, BaseProcess] = {}
            for number in range(times + at_once):
                lane = number % at_once
                if lane in running:
                    counts.failed_runs += _exit_code(running.pop(lane)) != 0
                if number < times and time.monotonic() < until_s:
                    counts.runs += 1
                    own = gpu_uuids[lane * program.num_ranks : (lane + 1) * program.num_ranks]
                    running[lane] = _started(program, folder / f"run-{number}", daemon.socket_path, own, num_steps)
            wait_until(lambda: not daemon.status()["jobs"], 60)
        counts.tracebacks += daemon.log.count(_TRACEBACK)
        for output in folder.glob("run-*/output*"):
            counts.tracebacks += output.read_text(encoding="utf-8", errors="replace").count(_TRACEBACK)
        _count_jobs(counts, daemon)
        if counts.failed_runs or counts.tracebacks or counts.policy_failures:
            print(daemon.log[-4000:], file=sys.stderr)


def _count_jobs(counts: Counts, daemon: DaemonProcess) -> None:
    with open_history(daemon.database_path) as history:
        for job in history.job_summaries():
            counts.jobs += 1
            events = history.control_events(job.job_id)
            counts.policy_failures += any(_POLICY_FAILURE.match(event.reason or "") for event in events)
            counts.with_plan += job.num_tuned_iterations > 0
            counts.without_outcome += not job.outcome_reason
            counts.reasons[f"{job.outcome}: {_without_numbers(job.outcome_reason or '')}"] += 1


def _started(program: Program, folder: Path, socket_path: Path, gpu_uuids: list[str], num_steps: int) -> BaseProcess:
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(program, folder, str(socket_path), gpu_uuids, num_steps)
    )
    process.start()
    return process


def _run(program: Program, folder: Path, socket_path: str, gpu_uuids: Sequence[str], num_steps: int) -> None:
    arguments = [*program.arguments, "--steps", str(num_steps)]
    variables = {"GPUENERGYD_SOCKET": socket_path, "GPUENERGYD_GPU_UUID": ",".join(gpu_uuids)}
    if program.framework is None:
        run_forked(folder, program.script, arguments, num_ranks=program.num_ranks, **variables)
        return
    with (folder / "output").open("wb") as output:
        subprocess.run(
            [str(python_of(program.framework)), str(program.script), *arguments],
            cwd=folder,
            env={**os.environ, **variables, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=True,
        )


def _exit_code(process: BaseProcess) -> int | None:
    process.join(LIMIT_S)
    process.kill()
    process.join()
    return process.exitcode


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy for the duration of a block."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_burn, daemon=True) for _ in range(os.cpu_count() or 1)]
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.join()


@contextmanager
def _idle() -> Iterator[None]:
    yield


def _burn() -> None:
    until_s = time.monotonic() + 24 * 3600.0
    while time.monotonic() < until_s:
        pass


def _without_numbers(text: str) -> str:
    return re.sub(r"[+-]?\d[\d.,]*", "N", text)


def _row(counts: Counts) -> dict[str, Any]:
    return {
        "runs": counts.runs,
        "failed_runs": counts.failed_runs,
        "jobs": counts.jobs,
        "policy_failures": counts.policy_failures,
        "tracebacks": counts.tracebacks,
        "with_plan": counts.with_plan,
        "without_outcome": counts.without_outcome,
        "reasons": dict(counts.reasons.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main())
