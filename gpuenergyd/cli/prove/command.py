"""`gpuenergyd prove`: measures a saving so that a stranger can repeat it, or checks such a measurement."""

import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuenergyd import __version__
from gpuenergyd.cli.exit_codes import EXIT_FAILED
from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError

if TYPE_CHECKING:
    from gpuenergyd.cli.prove.block_options import BlockOptions
    from gpuenergyd.cli.prove.job_blocks import JobBlocks
    from gpuenergyd.cli.prove.procedure import ProofRequest
    from gpuenergyd.cli.prove.training_blocks import TrainingBlocks
    from gpuenergyd.core.proof.registration import Arm

OURS = "tuned"
_SIMULATED_MICROBATCHES = 8


def prove(  # noqa: PLR0913  each option is a parameter
    *,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="Training program and its arguments, after --.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the proof.")] = Path("gpuenergyd-proof"),
    check: Annotated[
        Path | None, typer.Option("--check", metavar="DIR", help="Check a proof instead of running one.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="HEX", help="With --check: the public key that the author published.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Policy that the claim is about.")] = "bubble-aware",
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against", metavar="NAME", help="Further policy, e.g. uniform or power-limit:watts=300; repeatable."
        ),
    ] = None,
    max_slowdown: Annotated[
        float, typer.Option(callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
    ] = 0.0,
    margin: Annotated[
        float,
        typer.Option(min=0.0, max=0.2, metavar="RATIO", help="How much later than permitted the claim accepts."),
    ] = 0.01,
    smallest_saving: Annotated[
        float, typer.Option(min=0.001, max=0.5, metavar="RATIO", help="Smallest saving that the proof must show.")
    ] = 0.02,
    block_iterations: Annotated[
        int, typer.Option(min=3, max=100_000, metavar="N", help="Iterations of each block that count.")
    ] = 20,
    max_rounds: Annotated[
        int, typer.Option(min=8, max=1000, metavar="N", help="Most rounds; a round has a block of each arm.")
    ] = 30,
    block_limit_s: Annotated[float, typer.Option(min=1.0, metavar="S", help="Fail if a block takes longer.")] = 3600.0,
    meter: Annotated[
        str | None,
        typer.Option(metavar="METER", help="redfish:URL, prometheus:URL,QUERY, ipmi or powercap."),
    ] = None,
    meter_covers: Annotated[
        str | None, typer.Option(metavar="WHAT", help="node, node-and-network or components.")
    ] = None,
    meter_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, metavar="RATIO", help="Error of the meter by its data sheet.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Running job, by name or id, instead of COMMAND.")
    ] = None,
    losses: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to which COMMAND writes one loss per line.")
    ] = None,
    calibrate: Annotated[
        list[str] | None, typer.Option(metavar="GPU", help="Idle GPU to measure switch latencies on first; repeatable.")
    ] = None,
    simulated: Annotated[bool, typer.Option("--simulated", help="Train the demo's model on simulated GPUs.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="With --simulated: random seed.")] = 0,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Prove a saving with a pre-registered comparison.

    Runs COMMAND many times under the daemon, at full speed and tuned in turn. A pilot shows how many rounds are needed;
    then hypothesis, order and rules are signed before the first block counts. The folder holds raw data, verdict and a
    page; anybody can recompute the verdict with --check. The private key is never written. COMMAND must train longer
    than a block. With --job, a running job is paused and resumed in turn, and nothing is started anew.

    Examples:
        gpuenergyd prove -- torchrun --nproc-per-node 4 train.py
        gpuenergyd prove --job gpt --out proof
        gpuenergyd prove --simulated --block-iterations 10 --out proof
        gpuenergyd prove --check proof
    """
    if check is not None:
        if command or simulated or job is not None:
            raise UsageError("--check takes no COMMAND, no --job and no --simulated")
        return _check(check, key, as_json=as_json)
    if [bool(command), job is not None, simulated].count(True) != 1:
        raise UsageError("give the training program after --, or --job JOB, or --simulated, or --check DIR")
    if key is not None:
        raise UsageError("--key belongs to --check")
    if losses is not None and not command:
        raise UsageError("--losses belongs to a training program after --")
    from gpuenergyd.cli.prove.meters import open_meter  # noqa: PLC0415  start fast
    from gpuenergyd.cli.prove.procedure import prove as run_proof  # noqa: PLC0415

    opened = [] if meter is None else [open_meter(meter, covers=meter_covers, accuracy_ratio=meter_accuracy)]
    arms = _arms(policy, against or [])
    with ExitStack() as stack:
        if simulated:
            blocks: TrainingBlocks | JobBlocks = _simulated_blocks(stack, seed)
        elif job is not None:
            blocks = _job_blocks(stack, socket, job)
        else:
            blocks = _blocks(stack, socket, command or [], losses)
        options = blocks.options
        options.meters, options.block_limit_s = opened, block_limit_s
        options.max_slowdown_ratio, options.calibrated_gpus = max_slowdown, calibrate or []
        request = _request(
            blocks, arms,
            block_iterations=block_iterations,
            smallest_saving_ratio=smallest_saving,
            max_slowdown_ratio=max_slowdown + margin,
            max_rounds=max_rounds,
            meters=tuple(own.facts for own in opened),
        )  # fmt: skip
        found = run_proof(request, blocks, out, now_s=time.time, announce=lambda line: typer.echo(line, err=as_json))
    if as_json:
        print_json(found.to_dict() | {"folder": str(out)})
    return 0 if found.has_verdict else EXIT_FAILED


def _check(path: Path, key: str | None, *, as_json: bool) -> int:
    """Print what a check finds; return 1 unless the proof holds and has a verdict."""
    from gpuenergyd.cli.prove.folder import check_folder  # noqa: PLC0415  start fast

    checked = check_folder(path, public_key=key)
    if as_json:
        verdict = None if checked.verdict is None or not checked.holds else checked.verdict.to_dict()
        print_json({"holds": checked.holds, "problems": list(checked.problems), "verdict": verdict})
    elif not checked.holds:
        for problem in checked.problems:
            typer.echo(f"does not hold: {problem}")
        typer.echo("no verdict")
    elif checked.verdict is not None and checked.registration is not None:
        typer.echo(checked.verdict.sentence)
        trusted = "the published key" if key is not None else "the key in the folder; compare it with the published one"
        typer.echo(f"signatures, digests and design hold, verdict recomputed byte for byte; checked with {trusted}:")
        typer.echo(checked.registration.public_key)
    has_verdict = checked.holds and checked.verdict is not None and checked.verdict.has_verdict
    return 0 if has_verdict else EXIT_FAILED


def _arms(policy: str, against: list[str]) -> "tuple[Arm, ...]":
    from gpuenergyd.core.proof.registration import BASELINE_ARM, Arm  # noqa: PLC0415  start fast
    from gpuenergyd.daemon.processes.plugins import check_policy_name  # noqa: PLC0415

    for name in (policy, *against):
        check_policy_name(name)
    if len({policy, *against}) <= len(against) or "full-speed" in {policy, *against}:
        raise UsageError("--policy and --against: each policy once, and never full-speed, the arm to compare with")
    return (Arm(BASELINE_ARM, "full-speed"), Arm(OURS, policy), *(Arm(name, name) for name in against))


def _connected(stack: ExitStack, socket: str | None) -> "BlockOptions":
    """Connect to the running daemon."""
    from gpuenergyd.cli.demo.processes import raise_on_termination  # noqa: PLC0415  start fast
    from gpuenergyd.cli.prove.block_options import BlockOptions  # noqa: PLC0415
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE, Mode  # noqa: PLC0415

    raise_on_termination()
    path = find_socket_path(socket)
    options = BlockOptions(stack.enter_context(closing(DaemonClient(path))), path)
    if options.status()["mode"] == Mode.OBSERVE:
        raise UsageError(f"a proof compares full speed with plans, but {REFUSED_IN_OBSERVE}")
    return options


def _blocks(stack: ExitStack, socket: str | None, command: list[str], losses: Path | None) -> "TrainingBlocks":
    """Return blocks that start a program under the running daemon."""
    from gpuenergyd.cli.prove.training_blocks import TrainingBlocks  # noqa: PLC0415  start fast

    options = _connected(stack, socket)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuenergyd-prove-")))
    return TrainingBlocks(options, command, folder, losses_path=losses)


def _job_blocks(stack: ExitStack, socket: str | None, job: str) -> "JobBlocks":
    """Return blocks within a job of the running daemon."""
    from gpuenergyd.cli.prove.job_blocks import JobBlocks  # noqa: PLC0415  start fast

    return stack.enter_context(JobBlocks(_connected(stack, socket), job))


def _simulated_blocks(stack: ExitStack, seed: int) -> "TrainingBlocks":
    """Return blocks under a private daemon on simulated GPUs."""
    from gpuenergyd.cli.prove.block_options import BlockOptions  # noqa: PLC0415  start fast
    from gpuenergyd.cli.prove.simulated_host import simulated_host  # noqa: PLC0415
    from gpuenergyd.cli.prove.training_blocks import TrainingBlocks  # noqa: PLC0415
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415

    name = "proof-simulated"
    host = stack.enter_context(simulated_host(name, seed=seed, microbatches=_SIMULATED_MICROBATCHES))
    client = stack.enter_context(closing(DaemonClient(host.socket_path)))
    options = BlockOptions(client, host.socket_path, check=host.check)
    return TrainingBlocks(options, host.command, host.folder, losses_path=host.losses_path, job_name=name)


def _request(blocks: "TrainingBlocks | JobBlocks", arms: "tuple[Arm, ...]", **values: Any) -> "ProofRequest":
    """Return the request, with the versions of everything that takes part and whether any GPU is simulated."""
    from gpuenergyd.cli.prove.procedure import ProofRequest  # noqa: PLC0415  start fast
    from gpuenergyd.cli.versions import version_lines  # noqa: PLC0415

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
