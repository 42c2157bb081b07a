"""Runs a proof of a saving: calibration, pilot, registration, blocks in the registered order, verdict."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpuenergyd.count_text import count_text
from gpuenergyd_prove.folder import BLOCKS, PILOT, ProofFolder, sha256
from gpuenergyd_prove.proof.checks import num_blocks_due
from gpuenergyd_prove.proof.measurements import Block
from gpuenergyd_prove.proof.power_calculation import LEAST_PILOT_ROUNDS, design
from gpuenergyd_prove.proof.registration import (
    Arm,
    ExclusionRules,
    MeterFacts,
    Registration,
    block_order,
    hypothesis_text,
)
from gpuenergyd_prove.proof.verdict import Verdict, gpu_energies_j, log_ratios
from gpuenergyd_prove.signing import SigningKey

_MOST_PILOT_RATIO = 2
"""Pilot rounds that are too disturbed are repeated, up to this multiple of the planned number in total."""


class BlockRunner(Protocol):
    """Runs the training under one arm, on real or simulated GPUs."""

    def calibrate(self) -> Mapping[str, Any]:
        """Measure switch latencies and driver call times; return the results."""
        ...

    def rehearse(self, arm: Arm, *, num_iterations: int) -> None:
        """Run the training under one arm without counting it, so that planner and profile are ready later."""
        ...

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        """Run the training until `num_iterations` iterations have run under the arm's plan; return these.

        Raises:
            ProofError: the training ended too early, or no plan was made.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """The choices of the author of a proof."""

    command: tuple[str, ...]
    arms: tuple[Arm, ...]
    block_iterations: int
    smallest_saving_ratio: float
    max_slowdown_ratio: float
    max_rounds: int
    is_simulated: bool
    pilot_rounds: int = LEAST_PILOT_ROUNDS
    meters: tuple[MeterFacts, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    rules: ExclusionRules = field(default_factory=ExclusionRules)
    order_seed: int | None = None
    """Seed of the order of blocks; None for a random one."""


def prove(
    request: ProofRequest,
    runner: BlockRunner,
    path: Path,
    *,
    now_s: Callable[[], float],
    announce: Callable[[str], None],
) -> Verdict:
    """Run a proof into a new folder and return its verdict.

    Raises:
        UsageError: the folder exists.
        ProofError: a block failed, or the pilot shows that too few rounds are permitted; there is no conclusion then.
    """
    key = SigningKey()
    folder = ProofFolder(path, key)
    mark = "SIMULATED: " if request.is_simulated else ""
    announce(f"{mark}proof in {path}, signed with public key {key.public_key}")
    folder.write_calibration(runner.calibrate())
    seed = request.order_seed if request.order_seed is not None else secrets.randbelow(2**32)
    for arm in request.arms[1:]:
        announce(f"rehearsal block: {arm.name}, which does not count")
        runner.rehearse(arm, num_iterations=_num_iterations(request))
    planned = design(
        _pilot_log_ratios(request, runner, folder, seed, announce),
        block_iterations=request.block_iterations,
        smallest_saving_ratio=request.smallest_saving_ratio,
        max_rounds=request.max_rounds,
    )
    registration = Registration(
        registered_at_s=now_s(),
        public_key=key.public_key,
        hypothesis=hypothesis_text(request.arms[1], request.max_slowdown_ratio),
        command=request.command,
        arms=request.arms,
        design=planned,
        rules=request.rules,
        order_seed=seed,
        max_slowdown_ratio=request.max_slowdown_ratio,
        meters=request.meters,
        versions=tuple(sorted(request.versions)),
        pilot_sha256=sha256(path / PILOT),
        is_simulated=request.is_simulated,
    )
    digest = folder.register(registration)
    announce(
        f"{mark}registered: {registration.hypothesis}; {count_text(planned.num_rounds, 'round')}; SHA-256 {digest}"
    )
    _run_rounds(request, runner, folder, registration, announce)
    found = folder.finish()
    announce(found.sentence)
    return found


def _pilot_log_ratios(
    request: ProofRequest, runner: BlockRunner, folder: ProofFolder, seed: int, announce: Callable[[str], None]
) -> list[float]:
    """Run rounds until enough are usable, at most twice as many; return the usable rounds' log ratios."""
    names = [arm.name for arm in request.arms]
    order = block_order(names, _MOST_PILOT_RATIO * request.pilot_rounds, seed)
    blocks: list[Block] = []
    found: list[float] = []
    while len(found) < request.pilot_rounds and len(blocks) < len(order):
        number = len(blocks)
        announce(f"pilot block {number + 1} of {max(number + 1, len(names) * request.pilot_rounds)}: {order[number]}")
        blocks.append(_run(request, runner, folder, PILOT, order[number]))
        if len(blocks) % len(names) == 0:
            rounds = gpu_energies_j(blocks, len(names), request.rules, request.block_iterations)
            found = log_ratios(rounds, names[1])
    return found


def _run_rounds(
    request: ProofRequest,
    runner: BlockRunner,
    folder: ProofFolder,
    registration: Registration,
    announce: Callable[[str], None],
) -> None:
    """Run the registered rounds, and repeat void ones if the rules allow it."""
    order = registration.order()
    blocks: list[Block] = []
    while len(blocks) < (num_due := num_blocks_due(registration, blocks)):
        name = order[len(blocks)]
        is_spare = len(blocks) >= registration.design.num_rounds * len(request.arms)
        announce(f"block {len(blocks) + 1} of {num_due}: {name}{', for a void round' if is_spare else ''}")
        blocks.append(_run(request, runner, folder, BLOCKS, name))


def _run(request: ProofRequest, runner: BlockRunner, folder: ProofFolder, name: str, arm: str) -> Block:
    """Run one block and append it to a file of the folder."""
    arms = {known.name: known for known in request.arms}
    block = runner.run_block(arms[arm], num_iterations=_num_iterations(request))
    folder.append(name, block)
    return block


def _num_iterations(request: ProofRequest) -> int:
    """Return the number of iterations of a block, including those left out at its start."""
    return request.block_iterations + request.rules.settling_iterations
