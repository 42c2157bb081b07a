"""PP 4 x DP 2 across two hosts (network namespaces) with a daemon each: five faults that end a plan, and stragglers.

    python benchmarks/runs/two_hosts.py [--parts faults,stragglers] [--episodes 10] [--ratio 1.2] [--json]

After every fault training must continue at full speed with no clock lowered; the time until then is printed for each
fault. Then one replica becomes slower by the factor `--ratio`, several times. Every time the other replica must follow
within six iterations, and leave within four: otherwise the exit status is 1. Reported are the
iterations that the other replica waits until it has slowed down, its saving from then on against waiting, and the
iterations that it stays slow after the straggler has recovered, once with both pipelines across both hosts and once
with each replica on one host. Busy times and energies are those of the simulated GPUs. Needs root and an `ip` command
that can create network namespaces.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.host_trainer import rank_index
from tests.support.stopping import stop_between_driver_calls
from tests.support.straggling import Episode, provoke
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until

LIMIT_S = 120.0
VICTIM = rank_index(1, 2)
PLAN_LIMIT_S = 400.0
DURATION_SCALE = 8.0
"""Nearly a second per iteration, less than real ones take: planning on two cores beside eight ranks takes as long."""
SLOW_ITERATIONS = 20
"""Iterations that a straggler stays slow once it is detected, and fast before the next episode."""
FOLLOWED_WITHIN, LEFT_WITHIN = 6, 4
"""Iterations, the targets."""
PARTS = ("faults", "stragglers")
LAYOUTS = {"pipelines over both hosts": False, "replicas whole on a host": True}


def run_faults() -> dict[str, Any]:
    settings = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2, "silence_limit_s": 1.5}
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder), **settings) as hosts:
        return provoke_faults(hosts)


def run_stragglers(ratio: float, num_episodes: int, *, are_replicas_whole: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder), policy="bubble-aware") as hosts:
        hosts.start_training(are_replicas_whole=are_replicas_whole, duration_scale=DURATION_SCALE)
        hosts.wait_for_plan(PLAN_LIMIT_S)
        return episode_figures(
            [provoke(hosts, ratio, LIMIT_S, slow_iterations=SLOW_ITERATIONS) for _ in range(num_episodes)]
        )


def episode_figures(episodes: list[Episode]) -> dict[str, Any]:
    """Return the figures; medians over the stragglers that were followed, None if there were none."""
    savings = [(e.saving_ratio, e.reported_saving_ratio) for e in episodes if e.saving_ratio is not None]
    return {
        "iterations_until_followed": [episode.iterations_until_followed for episode in episodes],
        "iterations_until_recovered": [episode.iterations_until_recovered for episode in episodes],
        "num_not_followed": len(episodes) - len(savings),
        "num_in_time": sum(is_in_time(episode) for episode in episodes),
        "extrinsic_saving_ratio": median(own for own, _ in savings) if savings else None,
        "reported_saving_ratio": median(reported for _, reported in savings) if savings else None,
        "episodes": [asdict(episode) for episode in episodes],
    }


def is_in_time(episode: Episode) -> bool:
    """Return whether a straggler was followed and left within the targets."""
    followed, left = episode.iterations_until_followed, episode.iterations_until_recovered
    return followed is not None and left is not None and followed <= FOLLOWED_WITHIN and left <= LEFT_WITHIN


def provoke_faults(hosts: TwoHosts) -> dict[str, Any]:
    took_s: dict[str, float] = {}

    def lowered() -> None:
        wait_until(lambda: hosts.lowered() == [4, 4], LIMIT_S)

    def timed(what: str, is_so: object) -> None:
        begun_s = time.monotonic()
        wait_until(is_so, LIMIT_S)  # type: ignore[arg-type]  # a method without arguments
        took_s[what] = round(time.monotonic() - begun_s, 3)

    hosts.start_training(is_managed=False, microbatches=2)
    hosts.wait_for_progress(2, LIMIT_S)
    os.kill(hosts.pids()[VICTIM], signal.SIGKILL)
    without_us = hosts.wait_for_end(LIMIT_S)
    hosts.start_training(microbatches=2, max_slowdown=1.0, duration_scale=1.0)
    lowered()

    hosts.set_link("down")
    timed("link cut", hosts.is_as_found)
    hosts.set_link("up")
    hosts.wait_for_progress(3, LIMIT_S)
    lowered()

    stopped = hosts.pids()[rank_index(0, 3)]
    stop_between_driver_calls([stopped], *(daemon.world_path for daemon in hosts.daemons))
    timed("rank stopped", hosts.is_as_found)
    os.kill(stopped, signal.SIGCONT)
    hosts.wait_for_progress(3, LIMIT_S)
    lowered()

    for host, what in ((1, "daemon killed"), (0, "rank 0's daemon killed")):
        daemon = hosts.daemons[host]
        os.kill(daemon.pid, signal.SIGKILL)
        assert daemon.process is not None
        daemon.process.wait(10)
        timed(f"{what}: its own GPUs", daemon.is_as_found)
        timed(f"{what}: all GPUs at full speed", lambda: hosts.lowered() == [0, 0])
        hosts.wait_for_progress(3, LIMIT_S)
        assert hosts.lowered() == [0, 0], "nobody follows a plan that a daemon of its pipeline has lost"
        daemon.start()
        lowered()

    os.kill(hosts.pids()[VICTIM], signal.SIGKILL)
    with_us = hosts.wait_for_end(LIMIT_S)
    timed("rank killed", hosts.is_as_found)
    assert with_us == without_us, f"exit statuses {with_us}, without us {without_us}"
    return {"restored_after_s": took_s, "num_left_lowered": sum(hosts.lowered()), "exit_statuses": with_us}


def text(found: dict[str, Any]) -> str:
    lines = [
        f"{fault}: all GPUs at full speed after {seconds} s"
        for fault, seconds in found.get("restored_after_s", {}).items()
    ]
    for layout, seen in found.get("stragglers", {}).items():
        if seen["extrinsic_saving_ratio"] is None:
            lines.append(f"{layout}: none of {seen['num_not_followed']} stragglers was followed while it was slow")
            continue
        saving, reported = (100 * seen[key] for key in ("extrinsic_saving_ratio", "reported_saving_ratio"))
        lines.append(
            f"{layout}: followed after {seen['iterations_until_followed']} iterations, left after"
            f" {seen['iterations_until_recovered']} (None: not while it was slow), {seen['num_in_time']} of"
            f" {len(seen['episodes'])} in time; saves {saving:.1f} % against waiting (reported: {reported:.1f} %)"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="what to provoke, separated by commas")
    parser.add_argument("--episodes", type=int, default=10, help="stragglers per layout")
    parser.add_argument("--ratio", type=float, default=1.2, help="slowdown factor of the straggler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {options.parts}: no part {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    found: dict[str, Any] = {}
    try:
        if "faults" in parts:
            found |= run_faults()
        if "stragglers" in parts:
            found["straggler_ratio"] = options.ratio
            found["stragglers"] = {
                layout: run_stragglers(options.ratio, options.episodes, are_replicas_whole=is_whole)
                for layout, is_whole in LAYOUTS.items()
            }
    except NoNetworkNamespaceError as error:
        print(f"cannot create network namespaces: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if options.json else text(found))
    episodes = (seen["num_in_time"] == len(seen["episodes"]) for seen in found.get("stragglers", {}).values())
    return 0 if all(episodes) else 1


if __name__ == "__main__":
    sys.exit(main())
