import json
import os
import re
import sys
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.device_parameters import A100_SXM
from tests.gpu.conftest import NvmlWorld
from tests.support.processes import finished
from tests.support.waiting import LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "runs" / "real_gpu.py"


def test_it_only_reads() -> None:
    """The benchmark must be safe to run on a borrowed GPU."""
    calls = set(re.findall(r"pynvml\.(nvml\w+)", SCRIPT.read_text()))

    reading = {c for c in calls if re.match(r"nvml(Device|System)Get", c)}
    assert calls - reading <= {"nvmlInit", "nvmlShutdown"}


@pytest.mark.thorough
def test_it_measures_the_parameters_of_the_fake_driver(nvml_world: NvmlWorld) -> None:
    nvml_world.simulated.attach_process(nvml_world.gpus[0], os.getpid())

    done = finished(
        [sys.executable, str(SCRIPT), "--seconds", "2", "--json"],
        env=nvml_world.environment(),
        timeout=LIMIT_S,
        check=True,
    )

    result = json.loads(done.stdout)
    assert result["facts"]["supported_sm_clocks"] == {"count": 81, "min_mhz": 210, "max_mhz": 1410, "steps_mhz": [15]}
    idle = result["idle"]
    assert idle["update_period_ms"]["total_energy"]["median"] == pytest.approx(1000 * A100_SXM.energy_update_s, rel=0.1)
    assert idle["energy"]["mean_power_w"] == pytest.approx(A100_SXM.blocking_power_w, rel=0.1)
    assert idle["energy"]["instant_power_against_counter_ratio"] == pytest.approx(1.0, abs=0.1)
