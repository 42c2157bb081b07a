"""Sets up a proof: its arms, and its blocks under the running daemon or a private one on simulated GPUs."""

import shutil
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gpuenergyd import __version__
from gpuenergyd.cli.versions import version_lines
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.daemon.processes.plugins import check_policy_name
from gpuenergyd.errors import UsageError
from gpuenergyd_prove.block_options import BlockOptions
from gpuenergyd_prove.job_blocks import JobBlocks
from gpuenergyd_prove.procedure import ProofRequest
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm
from gpuenergyd_prove.training_blocks import TrainingBlocks
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.private_daemon.daemon import forget_settings, start_daemon, wait_for_daemon
from gpuenergyd_sim.private_daemon.processes import Children, raise_on_termination

OURS = "tuned"
_SIMULATED_JOB, _NUM_GPUS, _GPU_MODEL = "proof-simulated", 4, "a100-sxm"
_SHORT = Path("/tmp")  # noqa: S108  a socket's path is limited to 107 characters; the name is unguessable


def arms(policy: str, against: list[str]) -> tuple[Arm, ...]:
    """Return full speed, the policy that the claim is about, and further policies.

    Raises:
        UsageError: a policy is not installed, or is given twice.
    """
    for name in (policy, *against):
        check_policy_name(name)
    if len({policy, *against}) <= len(against) or "full-speed" in {policy, *against}:
        raise UsageError("--policy and --against: each policy once, and never full-speed, the arm to compare with")
    return (Arm(BASELINE_ARM, "full-speed"), Arm(OURS, policy), *(Arm(name, name) for name in against))


def blocks(
    stack: ExitStack, command: list[str], job: str | None, *, socket: str | None, losses: Path | None, seed: int
) -> TrainingBlocks | JobBlocks:
    """Return blocks that start `command` or control the running `job`; with neither, blocks on simulated GPUs."""
    if not command and job is None:
        return _simulated_blocks(stack, seed)
    raise_on_termination()
    path = find_socket_path(socket)
    options = BlockOptions(stack.enter_context(closing(DaemonClient(path))), path)
    if options.status()["mode"] == "observe":
        raise UsageError(
            "a proof compares full speed with plans, but mode = 'observe': the daemon never changes a GPU; set"
            ' mode = "control" and restart the daemon'
        )
    if job is not None:
        return stack.enter_context(JobBlocks(options, job))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuenergyd-prove-")))
    return TrainingBlocks(options, command, folder, losses_path=losses)


def request(blocks: TrainingBlocks | JobBlocks, arms: tuple[Arm, ...], **values: Any) -> ProofRequest:
    """Return the request, with the versions of all software and hardware involved, and whether a GPU is simulated."""
    status = blocks.options.status()
    models = sorted({str(gpu["model_name"]) for gpu in status["gpus"]})
    versions = {
        "gpuenergyd": __version__,
        "daemon": str(status["version"]),
        "driver": str(status["driver"]),
        "GPUs": f"{len(status['gpus'])} x {', '.join(models)}",
        "host": "; ".join(line.split(" (")[0] for line in version_lines()),
    }
    return ProofRequest(
        command=tuple(blocks.command),
        arms=arms,
        is_simulated=any(gpu["is_simulated"] for gpu in status["gpus"]),
        versions=tuple(sorted(versions.items())),
        **values,
    )


def _simulated_blocks(stack: ExitStack, seed: int) -> TrainingBlocks:
    """Return blocks of the demo's training under a private daemon on simulated GPUs; the stack ends and removes all."""
    forget_settings()
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-prove-", dir=_SHORT))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    world, losses_path, socket_path = folder / "world", folder / "losses.txt", str(folder / "run" / "gpuenergyd.sock")
    SimulatedHost.create(world, [_GPU_MODEL] * _NUM_GPUS, seed=seed, kind=WorldKind.UNKIND).close()
    (folder / "config.toml").touch()
    raise_on_termination()
    children = stack.enter_context(Children(folder))
    start_daemon(children, folder, "--driver", "simulated", "--world", str(world))
    client = stack.enter_context(closing(DaemonClient(socket_path)))
    wait_for_daemon(client, children.check)
    command = (
        sys.executable, "-m", "gpuenergyd_sim.training.gpt",
        "--world", str(world),
        "--stages", str(_NUM_GPUS),
        "--microbatches", "8",
        "--seed", str(seed),
        "--job", _SIMULATED_JOB,
        "--run-ahead", "1",
        "--losses-out", str(losses_path),
    )  # fmt: skip
    options = BlockOptions(client, socket_path, check=children.check)
    return TrainingBlocks(options, command, folder, losses_path=losses_path, job_name=_SIMULATED_JOB)
