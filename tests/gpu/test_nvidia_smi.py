"""The fake driver library has application clocks, and its `nvidia-smi` answers the queries of other tools."""

import csv
import os
import subprocess
from typing import Any

import pynvml as typed_pynvml
import pytest

from tests.gpu.conftest import NvmlWorld
from tests.support.waiting import LIMIT_S

pynvml: Any = typed_pynvml  # its classes of errors are made at run time

MODELS = ("A100-SXM4-80GB (simulated)", "A40-48GB (simulated)", "V100-SXM2-32GB (simulated)")


def nvidia_smi(world: NvmlWorld, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(world.library_folder / "bin" / "nvidia-smi"), *arguments]
    return subprocess.run(
        command, env=world.environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_application_clocks_are_the_maximum_and_cannot_be_set(nvml_world: NvmlWorld) -> None:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(nvml_world.gpus[0])

    for read in (pynvml.nvmlDeviceGetApplicationsClock, pynvml.nvmlDeviceGetDefaultApplicationsClock):
        assert [read(gpu, domain) for domain in (pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM)] == [1410, 1410]
        assert read(gpu, pynvml.NVML_CLOCK_MEM) == pynvml.nvmlDeviceGetSupportedMemoryClocks(gpu)[0]
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            read(gpu, 7)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceSetApplicationsClocks(gpu, 1593, 1005)
    pynvml.nvmlShutdown()


def test_nvidia_smi_lists_gpus_and_shows_them_in_a_table(nvml_world: NvmlWorld) -> None:
    listed, table, helped = (nvidia_smi(nvml_world, *arguments) for arguments in (["-L"], [], ["--help"]))

    assert listed.stdout.splitlines() == [
        f"GPU {index}: {name} (UUID: {uuid})"
        for index, (name, uuid) in enumerate(zip(MODELS, nvml_world.gpus, strict=True))
    ]
    assert "Driver Version: 599.00.00" in table.stdout
    assert len(table.stdout.splitlines()) == 2 + 3
    assert (listed.returncode, table.returncode, helped.returncode) == (0, 0, 0)


def test_nvidia_smi_answers_queries_in_the_forms_that_tools_parse(nvml_world: NvmlWorld) -> None:
    nvml_world.simulated.attach_process(nvml_world.gpus[1], os.getpid())
    fields = "index,uuid,clocks.sm,clocks.max.sm,clocks.applications.gr,power.limit,persistence_mode,mig.mode.current"

    header, first, *_ = nvidia_smi(nvml_world, f"--query-gpu={fields}", "--format=csv").stdout.splitlines()
    plain = nvidia_smi(nvml_world, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", "1,2").stdout
    processes = nvidia_smi(nvml_world, "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader").stdout
    unknown = nvidia_smi(nvml_world, "--query-gpu=colour", "--format=csv")

    assert header == (
        "index, uuid, clocks.sm [MHz], clocks.max.sm [MHz], clocks.applications.gr [MHz], power.limit [W],"
        " persistence_mode, mig.mode.current"
    )
    assert first == f"0, {nvml_world.gpus[0]}, 210 MHz, 1410 MHz, 1410 MHz, 480.00 W, Enabled, Disabled"
    rows = list(csv.reader(plain.splitlines(), skipinitialspace=True))
    assert rows[0] == ["1", nvml_world.gpus[1], "1740", "1740", "1740", "300.00", "Enabled", "Disabled"]
    assert rows[1][-1] == "[N/A]"  # no MIG on Volta
    assert processes == f"{os.getpid()}, {nvml_world.gpus[1]}\n"
    assert (unknown.returncode, unknown.stdout) == (2, 'Field "colour" is not a valid field to query.\n')


def test_nvidia_smi_locks_clocks_and_limits_power_if_permitted(nvml_world: NvmlWorld) -> None:
    locked = nvidia_smi(nvml_world, "-i", "0", "--lock-gpu-clocks=210,1005")
    limited = nvidia_smi(nvml_world, "-i", nvml_world.gpus[0], "-pl", "250")
    during = (
        nvml_world.simulated.locked_sm_clock_mhz(nvml_world.gpus[0]),
        nvml_world.simulated.power_limit_w(nvml_world.gpus[0]),
    )
    reset = nvidia_smi(nvml_world, "-i", "0", "-rgc")
    nvml_world.control.set_privileged(False)
    refused = nvidia_smi(nvml_world, "-i", "0", "-lgc", "1005")

    assert [done.returncode for done in (locked, limited, reset)] == [0, 0, 0]
    assert during == (1005, 250.0)
    assert nvml_world.simulated.locked_sm_clock_mhz(nvml_world.gpus[0]) is None
    assert refused.returncode == 4
    assert "does not have permission" in refused.stdout


@pytest.mark.parametrize("arguments", [["--colour"], ["--query-gpu"]])
def test_what_nvidia_smi_does_not_know_is_an_error(nvml_world: NvmlWorld, arguments: list[str]) -> None:
    assert nvidia_smi(nvml_world, *arguments).returncode == 2


def test_nvidia_smi_without_a_driver_fails_as_the_real_one(nvml_world: NvmlWorld) -> None:
    nvml_world.control.inject("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    done = nvidia_smi(nvml_world)

    assert done.returncode == 9
    assert done.stdout.startswith("NVIDIA-SMI has failed")
