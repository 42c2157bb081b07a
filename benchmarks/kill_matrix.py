"""Kill client, core, worker, policy host or all of them at random moments: is any GPU left lowered?

    python benchmarks/kill_matrix.py --trials 1000 --seed 1 [--json]

Prints how long GPUs stayed lowered after a client died (99th percentile) and after part of the daemon died (maximum:
by whoever was left, or by `restore` when all was dead), and whether the database survived. Needs the checkout.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.kill_rig import KillRig, Trial


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.trials < 1:
        parser.error(f"--trials {options.trials} must be at least 1")
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as folder:
        rig = KillRig(Path(folder), random.Random(options.seed))
        try:
            for trial in rig.run(options.trials):
                trials.append(trial)
                if not options.json and len(trials) % 50 == 0:
                    print(f"{len(trials)} of {options.trials}", file=sys.stderr)
        finally:
            rig.close()
    result = summary(trials)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28}{value}")
    return 0 if result["left_lowered"] == 0 and result["database_damaged"] == 0 else 1


def summary(trials: list[Trial]) -> dict[str, object]:
    client = sorted(t.restored_after_s for t in trials if t.victim == "client" and t.num_lowered)
    daemon = [t.restored_after_s for t in trials if t.victim in {"core", "worker", "all"} and t.num_lowered]
    return {
        "trials": len(trials),
        "trials_with_lowered_gpus": sum(t.num_lowered > 0 for t in trials),
        "trials_by_victim": dict(Counter(t.victim for t in trials)),
        "left_lowered": sum(t.num_left_lowered for t in trials),
        "database_damaged": sum(t.is_database_damaged for t in trials),
        "client_restore_p50_s": round(client[len(client) // 2], 4) if client else None,
        "client_restore_p99_s": round(client[min(len(client) - 1, int(0.99 * len(client)))], 4) if client else None,
        "daemon_restore_max_s": round(max(daemon), 4) if daemon else None,
    }


if __name__ == "__main__":
    sys.exit(main())
