"""CPU time of short commands, from the start of Python to their exit: help, version, status, report and a small plan.

    python benchmarks/runs/startup.py [--runs 15] [--json]

User and system time of whole processes, each command run once before, so that compiled modules are on disk. The daemon
that `status` asks controls four simulated GPUs, the history has one job, and the plan is that of the tutorial
(examples/pipeline.csv with 8 microbatches). Needs the checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.sample_history import write_sample_history

PROGRAM = Path(sys.executable).with_name("gpuenergyd")
TARGETS_CPU_S = {
    "help": 0.35, "version": 0.1, "status": 0.3, "status_json": 0.3, "status_without_daemon": 0.3, "report": 0.5,
    "plan": 1.0,
}  # fmt: skip
EXIT_STATUS = {"status_without_daemon": 3}
"""Of commands that do not exit with 0."""


def main() -> int:
    """Run and print; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="measured runs of each command")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.runs)
    if options.json:
        print(json.dumps(figures))
    else:
        print(f"{'command':<24}{'median':>8}{'min':>8}{'max':>8}{'target':>8}   CPU s, n = {options.runs}")
        for name, target_s in TARGETS_CPU_S.items():
            of = (figures[f"{name}_cpu_{kind}"] for kind in ("s", "min_s", "max_s"))
            print(f"{name:<24}{''.join(f'{value:>8.3f}' for value in (*of, target_s))}")
    return 0 if all(figures[f"{name}_cpu_s"] <= target_s for name, target_s in TARGETS_CPU_S.items()) else 1


def measure(num_runs: int) -> dict[str, Any]:
    """Return median, least and most CPU time of each command, with the targets."""
    figures: dict[str, Any] = {"n": num_runs, "targets_cpu_s": TARGETS_CPU_S}
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        history = write_sample_history(folder / "history.sqlite3")
        daemon = DaemonProcess(folder).start()
        try:
            socket = ("--socket", str(daemon.socket_path))
            commands = {
                "help": ("--help",),
                "version": ("--version",),
                "status": ("status", *socket),
                "status_json": ("status", "--json", *socket),
                "status_without_daemon": ("status", "--socket", str(folder / "none.sock")),
                "report": ("report", "--database", str(history)),
                "plan": ("plan", str(ROOT / "examples" / "pipeline.csv"), "--microbatches", "8",
                         "--blocking-power-w", "83.64"),
            }  # fmt: skip
            for command, arguments in commands.items():
                _, *used_s = (cpu_s(arguments, EXIT_STATUS.get(command, 0)) for _ in range(1 + num_runs))
                figures |= {
                    f"{command}_cpu_s": median(used_s),
                    f"{command}_cpu_min_s": min(used_s),
                    f"{command}_cpu_max_s": max(used_s),
                }
        finally:
            daemon.stop()
    return figures


def cpu_s(arguments: tuple[str, ...], exit_status: int) -> float:
    """Return the CPU time of one run of the program and of its child processes."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    process = subprocess.Popen([PROGRAM, *arguments], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != exit_status:
        raise SystemExit(f"gpuenergyd {' '.join(arguments)}: exit status {process.returncode}, not {exit_status}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
