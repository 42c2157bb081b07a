"""Kill the daemon, its worker, its sentinel or programs while idle GPUs are lowered, and check that none stays so.

    python benchmarks/runs/idle_kills.py --trials 300 --seed 1 [--hosts 3] [--json]

Each host has a daemon and simulated GPUs of its own, three of them held by processes that do nothing. Needs the
checkout. Fails if a GPU stays lowered, or a kill hit none that was.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.plugins.idle.idle_kills import VICTIMS, IdleKill, IdleKills


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks = [(f"{options.seed} {host}", options.trials // options.hosts) for host in range(options.hosts)]
    with multiprocessing.get_context("fork").Pool(options.hosts) as pool:
        kills = [kill for of_host in pool.map(_of_host, tasks, chunksize=1) for kill in of_host]
    result = {
        "trials": len(kills),
        "trials_by_victim": dict(Counter(kill.victim for kill in kills)),
        "gpus_lowered_at_kills": sum(kill.num_lowered for kill in kills),
        "without_effect": sum(not kill.num_lowered for kill in kills),
        "left_lowered": sum(kill.num_left for kill in kills),
        "restored_after_max_s": {
            victim: round(max((kill.restored_after_s for kill in kills if kill.victim == victim), default=0.0), 3)
            for victim in VICTIMS
        },
    }
    print(json.dumps(result) if options.json else "\n".join(f"{name:<24}{value}" for name, value in result.items()))
    return 1 if result["left_lowered"] or result["without_effect"] or not kills else 0


def _of_host(task: tuple[str, int]) -> list[IdleKill]:
    seed, num_kills = task
    with tempfile.TemporaryDirectory(prefix="idle-kills-", ignore_cleanup_errors=True) as folder:
        rig = IdleKills(Path(folder), random.Random(seed))
        try:
            kills = []
            for kill in rig.run(num_kills):
                kills.append(kill)
                print(json.dumps(asdict(kill)), file=sys.stderr, flush=True)
            return kills
        finally:
            rig.close()


if __name__ == "__main__":
    sys.exit(main())
