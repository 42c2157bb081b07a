"""`gpuenergyd prove`: measures a saving so that anyone can verify it, or checks such a measurement."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.exit_codes import EXIT_FAILED
from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError


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
        float, typer.Option(min=0.0, max=0.2, metavar="RATIO", help="Time accepted beyond the permitted one.")
    ] = 0.01,
    smallest_saving: Annotated[
        float, typer.Option(min=0.001, max=0.5, metavar="RATIO", help="Smallest saving that the proof must show.")
    ] = 0.02,
    block_iterations: Annotated[
        int, typer.Option(min=3, max=100_000, metavar="N", help="Evaluated iterations of each block.")
    ] = 20,
    max_rounds: Annotated[
        int, typer.Option(min=8, max=1000, metavar="N", help="Most rounds; a round has a block of each arm.")
    ] = 30,
    block_limit_s: Annotated[float, typer.Option(min=1.0, metavar="S", help="Fail if a block takes longer.")] = 3600.0,
    meter: Annotated[
        str | None, typer.Option(metavar="METER", help="redfish:URL, prometheus:URL,QUERY, ipmi or powercap.")
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

    Runs COMMAND many times under the daemon, at full speed and tuned in turn. A pilot shows how many rounds are needed.
    Then hypothesis, order and rules are signed, before the first block that counts. The folder holds raw data, verdict
    and a page; anybody can recompute the verdict with --check. The private key is never written. COMMAND must train
    longer than a block. With --job, a running job is paused and resumed in turn, and no program is started.

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
    from gpuenergyd_prove import procedure, setting_up  # noqa: PLC0415  the help starts fast
    from gpuenergyd_prove.meters import open_meter  # noqa: PLC0415

    opened = [] if meter is None else [open_meter(meter, covers=meter_covers, accuracy_ratio=meter_accuracy)]
    arms = setting_up.arms(policy, against or [])
    with ExitStack() as stack:
        blocks = setting_up.blocks(stack, command or [], job, socket=socket, losses=losses, seed=seed)
        options = blocks.options
        options.meters, options.block_limit_s = opened, block_limit_s
        options.max_slowdown_ratio, options.calibrated_gpus = max_slowdown, calibrate or []
        request = setting_up.request(
            blocks, arms,
            block_iterations=block_iterations,
            smallest_saving_ratio=smallest_saving,
            max_slowdown_ratio=max_slowdown + margin,
            max_rounds=max_rounds,
            meters=tuple(each.facts for each in opened),
        )  # fmt: skip
        found = procedure.prove(
            request, blocks, out, now_s=time.time, announce=lambda line: typer.echo(line, err=as_json)
        )
    if as_json:
        print_json(found.to_dict() | {"folder": str(out)})
    return 0 if found.has_verdict else EXIT_FAILED


def _check(path: Path, key: str | None, *, as_json: bool) -> int:
    """Print the result of a check; return 1 unless the proof is valid and has a verdict."""
    from gpuenergyd_prove.folder import check_folder  # noqa: PLC0415  the help starts fast

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
