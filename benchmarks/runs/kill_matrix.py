"""Kill client, daemon, worker, policy host or all of them at random moments and check that no GPU stays lowered.

    python benchmarks/runs/kill_matrix.py --trials 1000 --seed 1 [--lever power-limits] [--policy cost] [--commands]
                                           [--hosts 3]
    python benchmarks/runs/kill_matrix.py --trials 150 --seed 5 --power-budget-w 450

With a budget, its ceilings lower GPUs beyond the plans of their jobs. Clients and policy host die with all others then;
as their death leaves the budget in force, it is withdrawn just after it.

With `--commands` GPUs are changed by programs, as by the command driver. With `--hosts` several hosts, each with a
daemon and GPUs of its own, run their share of the trials at the same time: a kill matrix waits most of the time.

Prints how long GPUs stayed lowered after a client died (99th percentile) and after a part of the daemon died (maximum;
the remaining processes restore, or `gpuenergyd restore` if all are dead), whether the database survived, and how many
GPUs were lowered at the kills: a run fails if too few kills, of all or of one victim, hit a lowered GPU. For
comparison it measures in the same run what the machine and the simulated driver take by themselves: noticing the death
of a bare process plus one driver call, and starting an empty interpreter. Needs the checkout.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.core.policy_api.policy import Lever
from tests.support.kill_rig import UNDER_A_BUDGET, KillRig, Trial, without_effect

_OF_THE_DAEMON = ("daemon", "worker", "worker_and_sentinel", "all")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lever", choices=[*Lever], help="what the daemon may set; without it, all")
    parser.add_argument(
        "--policy", default="uniform", help="policy of the jobs, e.g. uniform, cost or power-profile:number=1"
    )
    parser.add_argument(
        "--power-budget-w", type=float, help="requested power budget of the host, withdrawn just after a client's death"
    )
    parser.add_argument("--hosts", type=int, default=1, help="hosts that run their share of the trials at a time")
    parser.add_argument("--commands", action="store_true", help="change GPUs by programs, as the command driver does")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.trials < options.hosts or options.hosts < 1:
        parser.error(f"--trials {options.trials} --hosts {options.hosts}: at least one of each, and a trial per host")
    load_before = os.getloadavg()[0]
    with multiprocessing.get_context("fork").Pool(options.hosts) as pool:
        of_hosts = pool.map(run_host, [(options, number) for number in range(options.hosts)], chunksize=1)
    trials = [trial for of_host, _, _ in of_hosts for trial in of_host]
    bare_restores_s = [each for _, of_host, _ in of_hosts for each in of_host]
    bare_starts_s = [each for _, _, of_host in of_hosts for each in of_host]
    result = summary(trials, bare_restores_s, bare_starts_s, options.hosts)
    result["load_average"] = [round(load_before, 1), round(os.getloadavg()[0], 1)]
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28}{value}")
    return 1 if result["left_lowered"] or result["database_damaged"] or result["without_effect"] else 0


def run_host(task: tuple[argparse.Namespace, int]) -> tuple[list[Trial], list[float], list[float]]:
    """Run a host's share of the trials; return them with the bare restores and starts measured between them."""
    options, number = task
    num_trials = options.trials // options.hosts + (number < options.trials % options.hosts)
    trials: list[Trial] = []
    bare_restores_s: list[float] = []
    bare_starts_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kill-matrix-", ignore_cleanup_errors=True) as folder:
        # The GPUs of all hosts have the same names, and the locks of their commands are not to meet.
        os.environ["RUNTIME_DIRECTORY"] = folder
        rig = KillRig(
            Path(folder),
            random.Random(options.seed if options.hosts == 1 else f"{options.seed} {number}"),
            policy=options.policy,
            levers=(Lever(options.lever),) if options.lever else tuple(Lever),
            model="b200" if options.lever == Lever.POWER_PROFILES else "a100-sxm",
            power_budget_w=options.power_budget_w,
            uses_commands=options.commands,
        )
        if options.power_budget_w is not None:
            rig.weights = UNDER_A_BUDGET
        try:
            for trial in rig.run(num_trials):
                trials.append(trial)
                if trial.victim == "client":
                    bare_restores_s.append(rig.time_bare_restore())
                elif trial.victim in _OF_THE_DAEMON:
                    bare_starts_s.append(time_bare_start())
                if not options.json and len(trials) % 50 == 0:
                    print(f"host {number}: {len(trials)} of {num_trials}", file=sys.stderr)
        finally:
            rig.close()
    return trials, bare_restores_s, bare_starts_s


def time_bare_start() -> float:
    """Return how long an empty interpreter takes to start and exit."""
    begun_s = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    return time.monotonic() - begun_s


def summary(
    trials: list[Trial], bare_restores_s: list[float], bare_starts_s: list[float], num_hosts: int
) -> dict[str, object]:
    client = [t.restored_after_s for t in trials if t.victim == "client" and t.num_lowered]
    daemon = [t for t in trials if t.victim in _OF_THE_DAEMON and t.num_lowered]
    return {
        "hosts": num_hosts,
        "trials": len(trials),
        "trials_with_lowered_gpus": sum(t.num_lowered > 0 for t in trials),
        "gpus_lowered_at_kills": sum(t.num_lowered for t in trials),
        "trials_by_victim": dict(Counter(t.victim for t in trials)),
        "trials_with_lowered_gpus_by_victim": dict(Counter(t.victim for t in trials if t.num_lowered)),
        "without_effect": list(without_effect(trials)),
        "left_lowered": sum(t.num_left_lowered for t in trials),
        "database_damaged": sum(t.is_database_damaged for t in trials),
        "client_restore_p50_s": quantile(client, 0.5),
        "client_restore_p99_s": quantile(client, 0.99),
        "bare_restore_p50_s": quantile(bare_restores_s, 0.5),
        "bare_restore_p99_s": quantile(bare_restores_s, 0.99),
        "daemon_restore_max_s": quantile([t.restored_after_s for t in daemon], 1.0),
        "daemon_restore_max_s_by_victim": {
            victim: quantile([t.restored_after_s for t in daemon if t.victim == victim], 1.0)
            for victim in _OF_THE_DAEMON
        },
        "bare_start_max_s": quantile(bare_starts_s, 1.0),
    }


def quantile(values_s: list[float], ratio: float) -> float | None:
    """Return a quantile."""
    ordered = sorted(values_s)
    return round(ordered[min(len(ordered) - 1, int(ratio * len(ordered)))], 4) if ordered else None


if __name__ == "__main__":
    sys.exit(main())
