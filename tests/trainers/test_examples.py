"""The examples run as they stand, learn, and join."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_RANKS = 2
RUN_LIMIT_S = 400.0


@pytest.mark.parametrize(("name", "schedule_name"), [("gpt_pipeline", "1f1b"), ("ddp_images", "loop")])
def test_example_runs_as_it_stands_learns_and_joins(tmp_path: Path, name: str, schedule_name: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    with FakeDaemon(tmp_path) as daemon:
        variables = {
            "GPUENERGYD_SOCKET": daemon.socket_path,
            "GPUENERGYD_GPU_UUID": ",".join(f"GPU-{rank}" for rank in range(NUM_RANKS)),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [*launcher, str(EXAMPLES / f"{name}.py"), "--steps", "12"],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(NUM_RANKS)]
        num_reports = daemon.reports.qsize()

    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert done.returncode == 0, done.stderr
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert {registration["gpu_uuid"] for registration in registrations} == {"GPU-0", "GPU-1"}
    assert {registration["schedule_name"] for registration in registrations} == {schedule_name}
    assert num_reports > 0
