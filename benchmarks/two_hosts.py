"""PP 4 x DP 2 over two hosts in network namespaces, each with its own daemon: one plan, and five ways to lose it.

    python benchmarks/two_hosts.py          needs root, and an `ip` command that may make network namespaces

Ends with 0 when every fault left training as without us and no clock lowered; says how long each took to be so.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.host_trainer import rank_index
from tests.support.stopping import stop_between_driver_calls
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until

LIMIT_S = 120.0
VICTIM = rank_index(1, 2)


def run(hosts: TwoHosts) -> dict[str, object]:
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
    hosts.start_training(microbatches=2, max_slowdown=3.0, duration_scale=1.0)
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


def main() -> int:
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            two_hosts(
                Path(folder), policy="uniform", warmup_iterations=0, baseline_iterations=2, silence_limit_s=1.5
            ) as hosts,
        ):
            print(json.dumps(run(hosts), indent=2))
    except NoNetworkNamespaceError as error:
        print(f"no network namespaces here: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
