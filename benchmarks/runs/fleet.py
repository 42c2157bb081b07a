"""Load of a fleet of simulated hosts on a real PostgreSQL and a real Prometheus.

The readings of the hosts are simulated, the load on the servers is real: each write is a transaction of the history
writer with default settings on its own connection, and the metrics are rendered by the daemon's code. Samples, which
hosts pack themselves, are packed beforehand and drawn from a pool. Some hosts run the complete writer in real time.

    python benchmarks/runs/fleet.py [--hosts 1000] [--json]
    python benchmarks/runs/fleet.py --only postgresql|prometheus

The part of a server that is not installed is skipped with a message. Load generator and servers share the machine, so
rates are lower bounds.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "runs")]

from fleet_postgresql import postgresql_figures  # noqa: E402  beside this file
from fleet_prometheus import prometheus_figures  # noqa: E402  as above

PARTS = ("postgresql", "prometheus")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--write-seconds", type=float, default=30.0, help="how long the hosts write to PostgreSQL")
    parser.add_argument("--burst-seconds", type=float, default=8.0, help="how long as fast as the server takes it")
    parser.add_argument("--days", type=int, default=1, help="how many days of history the reports read")
    parser.add_argument("--scrape-seconds", type=float, default=50.0, help="how long Prometheus scrapes")
    parser.add_argument("--whole-writers", type=int, default=4, help="hosts that run the whole writer")
    parser.add_argument("--only", choices=PARTS, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {"num_hosts": options.hosts, "gpus_per_host": 8, "load": round(os.getloadavg()[0], 1)}
    for name in PARTS if options.only is None else (options.only,):
        measure = postgresql_figures if name == "postgresql" else prometheus_figures
        figures[name] = measure(options)
    for name in PARTS:
        figures.setdefault(name, {"absent": "not asked for"})
    if all("absent" in figures[name] for name in PARTS):
        print("; ".join(f"{name}: {figures[name]['absent']}" for name in PARTS), file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=None if options.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
