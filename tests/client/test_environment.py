"""Options, GPU and run key from the environment; a slowdown that is out of range or probably a mistake is named."""

import logging
import os
import sys
from pathlib import Path

import pytest

from gpuenergyd.client.environment import MAX_SLOWDOWN_VARIABLE, find_gpu_uuid, find_job_options, find_run_key


@pytest.mark.parametrize("value", ["5", "1.01", "-0.1", "nan", "inf", "much"])
def test_a_slowdown_out_of_range_is_ignored_with_the_valid_range(value: str, caplog: pytest.LogCaptureFixture) -> None:
    options = find_job_options("job", environ={MAX_SLOWDOWN_VARIABLE: value})

    assert options.max_slowdown_ratio is None
    assert options.from_environment == ()
    assert caplog.messages == [
        f"gpuenergyd: {MAX_SLOWDOWN_VARIABLE}='{value}' is ignored: must be a ratio from 0 to 1, e.g. 0.05 for 5 %"
    ]


@pytest.mark.parametrize(("value", "is_warned_about"), [("0", False), ("0.5", False), ("0.51", True), ("1", True)])
def test_a_slowdown_that_is_probably_a_percentage_is_warned_about(
    value: str, *, is_warned_about: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    options = find_job_options("job", environ={MAX_SLOWDOWN_VARIABLE: value})

    assert options.max_slowdown_ratio == float(value)
    assert ("longer; 0.05 is 5 %" in caplog.text) is is_warned_about


UUID = "GPU-51a00000-0000-4000-8000-000000070002"


@pytest.mark.parametrize(
    ("visible", "gpu_uuid"),
    [
        (UUID, UUID), ("0", ""), ("1,0", ""), (f"{UUID},0", ""), ("GPU-51a0", ""), ("MIG-51a0", ""), ("", None),
        ("-1", None), ("NoDevFiles", None), ("none,0", None),
    ],
)  # fmt: skip
def test_without_torch_the_gpu_is_what_cuda_shows_to_the_process(
    visible: str, gpu_uuid: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert find_gpu_uuid(environ={"CUDA_VISIBLE_DEVICES": visible}) == gpu_uuid
    assert find_gpu_uuid(environ={"CUDA_VISIBLE_DEVICES": visible, "GPUENERGYD_GPU_UUID": "GPU-1"}) == "GPU-1"
    assert find_gpu_uuid(environ={}) is None


def test_keys_of_a_run_that_other_containers_may_have_too_name_the_namespace() -> None:
    pids, network = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net"))

    assert find_run_key(environ={}) == f"pid={os.getpid()},pid_namespace={pids}"
    assert find_run_key(num_processes=2, environ={}) == f"parent={os.getppid()},pid_namespace={pids}"
    for address in ("localhost", "127.0.0.1", "::1"):
        key = find_run_key(environ={"MASTER_ADDR": address, "MASTER_PORT": "29500"})
        assert key == f"master_addr={address},master_port=29500,net_namespace={network}"
    assert find_run_key(environ={"MASTER_ADDR": "node1"}) == "master_addr=node1"
