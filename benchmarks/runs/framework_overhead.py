"""Measures the time of the client within training steps of Lightning, the Hugging Face Trainer and DeepSpeed.

    python benchmarks/runs/framework_overhead.py [--repeats 10] [--json]

Trains the tiny models of the adapters' tests in the environments built by `make frameworks`, joined to a daemon, and
adds up the time that the training thread spends in the client: `client_us` per iteration, beside the time of the
iteration. For real models the former is the same and the latter much longer. Needs the checkout.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.client.rank import RankClient
from tests.client.fake_daemon import FakeDaemon
from tests.support.framework_environments import ROOT, is_built, python_of

NAMES = ("deepspeed", "huggingface", "lightning")
NS_PER_US = 1_000
LIMIT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="number of training runs of a few iterations each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(measured(options.inside, options.repeats)))
        return 0
    result: dict[str, Any] = {}
    for name in NAMES:
        if not is_built(name):
            print(f"no environment for {name}; `make frameworks` builds one", file=sys.stderr)
            continue
        command = [str(python_of(name)), __file__, "--inside", name, "--repeats", str(options.repeats)]
        sources = os.pathsep.join(str(ROOT / folder) for folder in ("", "policies", "trainers"))
        environ = {**os.environ, "PYTHONPATH": sources}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
        result[name] = json.loads(done.stdout.splitlines()[-1])
        if not options.json:
            print(f"{name:<12} {result[name]}", flush=True)
    if options.json and result:  # the results of the other frameworks are still useful
        print(json.dumps(result))
    return 0 if result else 1


class ClientTime:
    """Sums the time in the client's methods within a step, by iteration."""

    def __init__(self) -> None:
        self.client_ns: list[int] = []
        self.begins_ns: list[int] = []
        for name in ("begin_iteration", "end_iteration", "begin_instruction", "end_instruction"):
            setattr(RankClient, name, self._timed(getattr(RankClient, name), is_begin=name == "begin_iteration"))

    def _timed(self, method: Callable[..., Any], *, is_begin: bool) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_ns = perf_counter_ns()
            result = method(*args)
            took_ns = perf_counter_ns() - began_ns
            if is_begin:
                self.begins_ns.append(began_ns)
                self.client_ns.append(0)
            if self.client_ns:
                self.client_ns[-1] += took_ns
            return result

        return timed

    def reported(self) -> dict[str, float]:
        """Return the median times of the client and of iterations."""
        steps_ns = [later - earlier for earlier, later in zip(self.begins_ns, self.begins_ns[1:], strict=False)]
        client_us = statistics.median(self.client_ns) / NS_PER_US
        step_us = statistics.median(steps_ns) / NS_PER_US
        return {"client_us": round(client_us, 1), "iteration_us": round(step_us, 1), "n": len(self.client_ns)}


def measured(name: str, num_repeats: int) -> dict[str, float]:
    """Train in this process, or in ranks forked from it; return the times."""
    tests = importlib.import_module(f"tests.trainers.test_{name}")
    with tempfile.TemporaryDirectory() as folder, FakeDaemon(Path(folder)) as daemon:
        if name == "deepspeed":
            from tests.trainers.pipeline_processes import run_ranks  # noqa: PLC0415  needs torch

            found: list[dict[str, float]] = []
            for repeat in range(max(1, num_repeats // 5)):
                (own := Path(folder) / str(repeat)).mkdir()
                found += run_ranks(tests.NUM_RANKS, own, train_deepspeed, tests.train, daemon.socket_path)
            return max(found, key=lambda each: each["client_us"])
        adapter = importlib.import_module(f"gpuenergyd_trainers.{name}")
        client_time = ClientTime()
        train = tests.fit if name == "lightning" else tests.train
        # Output of the frameworks must not mix with the results.
        sys.stdout = sys.stderr
        for repeat in range(num_repeats):
            (own := Path(folder) / str(repeat)).mkdir()
            train(own, [adapter.gpuenergy_callback("cost", gpu_uuid="GPU-1", socket_path=daemon.socket_path)])
        sys.stdout = sys.__stdout__
        return client_time.reported()


def train_deepspeed(rank: int, train: Callable[..., Any], socket_path: str) -> dict[str, float]:
    """Train one rank of the test's pipeline; return its times."""
    client_time = ClientTime()
    train(rank, socket_path)
    return client_time.reported()


if __name__ == "__main__":
    sys.exit(main())
