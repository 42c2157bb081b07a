"""Clocks of the published trainings of replay_insitu.py: which clock each forward and backward ran at.

The artifact of the Perseus paper keeps a file `<plan>.sched.json` per plan, in a folder per training: for each rank one
clock per command of its runtime. The runtime (Merak, from DeepSpeed) walks through slots: stage s of S runs the
forward of microbatch m in slot 2 m + s and its backward in slot 2 m + 2 S - 1 - s. In the slot in which a neighbour
consumes what another has produced in the slot before, both have one command that sends and receives. The first and the
last stage load a microbatch before its forward; three commands end the iteration.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

COMMIT = "1b1c4a9d7fe73b9bc3ca3a365feb60e851226296"
"""Of github.com/ml-energy/zeus, branch kronos: the artifact that the curves and iterations are from."""

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"
NUM_COMMANDS_AT_END = 3


def commands(stage: int, num_stages: int, num_microbatches: int) -> Iterator[str]:
    """Yield the commands of one stage in the order of the runtime."""

    def exists(doubled_index: int) -> bool:
        return 0 <= doubled_index < 2 * num_microbatches

    for slot in range(2 * (num_microbatches + num_stages - 1)):
        ahead, behind = slot - stage, slot - (2 * num_stages - 1 - stage)
        """Twice the microbatch whose forward, and whose backward, falls into this slot, where even."""
        if ahead % 2 == 0:
            has_work, has_sent = exists(ahead), slot > 0 and exists(behind - 1)
            if stage > 0 and (has_work or has_sent):
                yield OTHER
            if has_work and stage in {0, num_stages - 1}:
                yield OTHER
            if has_work:
                yield FORWARD
        else:
            has_work, has_sent = exists(behind), slot > 0 and exists(ahead - 1)
            if stage < num_stages - 1 and (has_work or has_sent):
                yield OTHER
            if has_work:
                yield BACKWARD
    yield from [OTHER] * NUM_COMMANDS_AT_END


class PlannedClocks:
    """The clock files below some folders; of a git repository, those of the artifact's commit."""

    def __init__(self, folders: list[Path]) -> None:
        self._files = {file: partial(file.read_text) for folder in folders for file in folder.rglob("*.sched.json")}
        for folder in folders:
            for name in _git(folder, "ls-tree", "-r", "--name-only", COMMIT, "sosp24_data").splitlines():
                if name.endswith(".sched.json"):
                    self._files[Path(name)] = partial(_git, folder, "show", f"{COMMIT}:{name}")

    def of(self, run: str, source: str, plan: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the clocks in MHz of each stage's forwards and backwards in program order; None without a file.

        Args:
            run: name of the training, as `A40__t5-3b__pp8_nmb32`.
            source: who planned: `perseus` or `envpipe`.
            plan: number of the plan.

        Raises:
            ValueError: the file does not fit the training's size.
        """
        gpu, model, num_stages, num_microbatches = parts_of(run)
        for file, read in self._files.items():
            folder = file.parent.name
            if (
                file.name == f"{plan}.sched.json"
                and {source, gpu, f"dp1+pp{num_stages}+tp1"} <= set(file.parts)
                and f"+{model}+" in folder
                and re.search(rf"\+nmb{num_microbatches}(\+|$)", folder)
            ):
                return _clocks(file.name, read(), num_stages, num_microbatches)
        return None


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints; empty if the folder is no repository with that commit, or there is no git."""
    if not any((folder / name).exists() for name in (".git", "HEAD")):
        return ""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def parts_of(run: str) -> tuple[str, str, int, int]:
    """Return GPU, model, number of stages and of microbatches of a training from its name.

    Raises:
        ValueError: the name is not `<GPU>__<model>__pp<S>_nmb<M>`.
    """
    found = re.fullmatch(r"(.+?)__(.+)__pp(\d+)_nmb(\d+)", run)
    if found is None:
        raise ValueError(f"{run!r}: expected a name like A40__t5-3b__pp8_nmb32")
    return found[1], found[2], int(found[3]), int(found[4])


@cache
def _is_computation(stage: int, num_stages: int, num_microbatches: int) -> tuple[bool, ...]:
    return tuple(command != OTHER for command in commands(stage, num_stages, num_microbatches))


def _clocks(name: str, text: str, num_stages: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    by_rank = {entry["rank"]: entry["power_states"] for entry in json.loads(text)}
    clocks = []
    for stage in range(num_stages):
        is_computation = _is_computation(stage, num_stages, num_microbatches)
        given = by_rank.get(stage, [])
        if len(given) != len(is_computation):
            raise ValueError(f"{name}: {len(given)} clocks for stage {stage}; its commands are {len(is_computation)}")
        clocks.append(tuple(mhz for mhz, is_one in zip(given, is_computation, strict=True) if is_one))
    return tuple(clocks)
