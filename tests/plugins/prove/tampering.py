"""Ways to make a finished proof say something else; each must cost it its verdict."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuenergyd import __version__
from gpuenergyd_prove.folder import (
    BLOCKS,
    MANIFEST,
    PAGE,
    REGISTRATION,
    VERDICT,
    ProofFolder,
    canonical,
    check_folder,
    read_registration,
    sha256,
)
from gpuenergyd_prove.procedure import ProofRequest, prove
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm
from gpuenergyd_prove.signing import SigningKey
from tests.plugins.prove.virtual_training import VirtualTraining

OURS = "ours"
SMALLEST_SAVING_RATIO = 0.02


def request(**values: Any) -> ProofRequest:
    """Return a short proof of a made-up training."""
    usual: dict[str, Any] = {
        "command": ("train.py",),
        "arms": (Arm(BASELINE_ARM, "full-speed"), Arm(OURS, "bubble-aware")),
        "block_iterations": 20,
        "smallest_saving_ratio": SMALLEST_SAVING_RATIO,
        "max_slowdown_ratio": 0.01,
        "max_rounds": 60,
        "is_simulated": True,
        "order_seed": 1,
        "versions": (("gpuenergyd", __version__),),
    }
    return ProofRequest(**usual | values)


def proved(path: Path, training: VirtualTraining, **values: Any) -> Any:
    """Run a proof of a made-up training into a new folder; return its verdict."""
    return prove(request(**values), training, path, now_s=training.time, announce=lambda _line: None)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_bytes(canonical(values))


def edited_registration(path: Path) -> None:
    """Claim less, afterwards."""
    _edit_json(path / REGISTRATION, lambda values: values.update(max_slowdown_ratio=0.5))


def edited_energy(path: Path) -> None:
    """Lower the energy of one iteration."""
    lines = (path / BLOCKS).read_text().splitlines()
    block = json.loads(lines[1])
    block["iterations"][5][3] *= 0.9
    (path / BLOCKS).write_text("\n".join([lines[0], canonical(block).decode().strip(), *lines[2:]]) + "\n")


def removed_block(path: Path) -> None:
    """Leave out a block."""
    lines = (path / BLOCKS).read_text().splitlines()
    (path / BLOCKS).write_text("\n".join(lines[:-1]) + "\n")


def removed_pilot(path: Path) -> None:
    """Remove a file of raw data."""
    (path / "raw" / "pilot.jsonl").unlink()


def added_file(path: Path) -> None:
    """Add raw data that was not signed."""
    (path / "raw" / "more.jsonl").write_text("{}\n")


def edited_manifest(path: Path) -> None:
    """Change the data and their digest."""
    edited_energy(path)
    _edit_json(path / MANIFEST, lambda values: values["sha256"].update({BLOCKS: sha256(path / BLOCKS)}))


def edited_verdict(path: Path) -> None:
    """Improve the verdict."""
    (path / VERDICT).write_text((path / VERDICT).read_text().replace("-1", "-2"))


def edited_page(path: Path) -> None:
    """Remove the mark of simulation from the page."""
    (path / PAGE).write_text((path / PAGE).read_text().replace("SIMULATED", "Measured"))


def flattering_page(path: Path) -> None:
    """As the author: sign a page that says more than the verdict."""
    _sign_again(path, list, after=lambda: edited_page(path))


def exchanged_key(path: Path) -> None:
    """Sign everything again with a key of one's own, with better data."""
    _sign_again(path, list)


def unfinished(path: Path) -> None:
    """Stop before the end, when the figures look best."""
    (path / MANIFEST).unlink()


def _sign_again(
    path: Path, change: Callable[[list[str]], list[str]], *, after: Callable[[], None] | None = None
) -> None:
    """Do as the author could who changes raw data before signing: all signatures and digests are right."""
    key = SigningKey()
    registration = json.loads((path / REGISTRATION).read_text()) | {"public_key": key.public_key}
    lines = change((path / BLOCKS).read_text().splitlines())
    for name in (MANIFEST, "manifest.sig", VERDICT, PAGE):
        (path / name).unlink()
    folder = ProofFolder.__new__(ProofFolder)
    folder.path, folder._key = path, key
    folder._write_signed(REGISTRATION, canonical(registration))
    (path / BLOCKS).write_text("\n".join(lines) + "\n")
    folder.finish()
    if after is not None:
        after()
        digests = json.loads((path / MANIFEST).read_text())["sha256"]
        content = canonical({"sha256": {name: sha256(path / name) for name in digests}})
        folder._write_signed(MANIFEST, content)


def signed_by_a_stranger(
    path: Path,
    *,
    registration: Callable[[dict[str, Any]], None] = lambda _: None,
    block: Callable[[dict[str, Any]], object] = lambda values: values,
) -> None:
    """Write any values into the registration and the first block, and sign the folder with a key of one's own."""
    key = SigningKey()
    registered = json.loads((path / REGISTRATION).read_text()) | {"public_key": key.public_key}
    registration(registered)
    first, *lines = (path / BLOCKS).read_text().splitlines()
    changed = block(json.loads(first))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    (path / BLOCKS).write_text("\n".join([text, *lines]) + "\n")
    folder = ProofFolder.__new__(ProofFolder)
    folder.path, folder._key = path, key
    folder._write_signed(REGISTRATION, json.dumps(registered).encode())
    digests = {name: sha256(path / name) for name in json.loads((path / MANIFEST).read_text())["sha256"]}
    folder._write_signed(MANIFEST, canonical({"sha256": digests}))


def _edited(lines: list[str], number: int, change: Callable[[dict[str, Any]], None]) -> list[str]:
    block = json.loads(lines[number])
    change(block)
    return [*lines[:number], canonical(block).decode().strip(), *lines[number + 1 :]]


def fewer_rounds(path: Path) -> None:
    """As the author: stop early and sign."""
    _sign_again(path, lambda lines: lines[:-4])


def removed_repetition(path: Path) -> None:
    """As the author: leave out the round that replaced a void one, and sign."""
    _sign_again(path, lambda lines: lines[:-2])


def swapped_arms(path: Path) -> None:
    """As the author: call a full-speed block tuned."""

    def swap(lines: list[str]) -> list[str]:
        other = {OURS: BASELINE_ARM, BASELINE_ARM: OURS}
        for number in (0, 1):
            lines = _edited(lines, number, lambda block: block.update(arm=other[block["arm"]]))
        return lines

    _sign_again(path, swap)


def scaled_counters(path: Path) -> None:
    """As the author: lower all counters of a block, and forget the power samples beside them."""

    def scale(block: dict[str, Any]) -> None:
        for sample in block["iterations"]:
            sample[3] *= 0.8

    _sign_again(path, lambda lines: _edited(lines, 2, scale))


def older_block(path: Path) -> None:
    """As the author: use a block from before the registration."""

    def move(block: dict[str, Any]) -> None:
        shift_s = 5000.0
        block["begun_at_s"] -= shift_s
        block["ended_at_s"] -= shift_s
        for series, column in (("iterations", 1), ("gpu_power", 0)):
            for sample in block[series]:
                sample[column] -= shift_s

    _sign_again(path, lambda lines: _edited(lines, 0, move))


def repeated_block(path: Path) -> None:
    """As the author: use a good block twice."""

    def repeat(lines: list[str]) -> list[str]:
        arms = [json.loads(line)["arm"] for line in lines]
        tuned = [k for k, arm in enumerate(arms) if arm == OURS]
        return [*lines[: tuned[1]], lines[tuned[0]], *lines[tuned[1] + 1 :]]

    _sign_again(path, repeat)


def smaller_design(path: Path) -> None:
    """As the author: register fewer rounds than the pilot asks for."""
    rounds = json.loads((path / REGISTRATION).read_text())["design"]["num_rounds"]
    _edit_json(path / REGISTRATION, lambda values: values["design"].update(num_rounds=rounds - 1))
    _sign_again(path, lambda lines: lines[:-2])


TAMPERING: Mapping[str, Callable[[Path], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        edited_registration, edited_energy, removed_block, removed_pilot, added_file, edited_manifest, edited_verdict,
        edited_page, flattering_page, exchanged_key, unfinished, fewer_rounds, swapped_arms, scaled_counters,
        older_block, repeated_block, smaller_design,
    )
}  # fmt: skip
"""Changes of a finished proof by what they do."""


def is_caught(path: Path, change: Callable[[Path], None], copy: Path) -> str | None:
    """Return why a tampered copy of a proof has no verdict; None if it has one."""
    published = read_registration(path).public_key
    shutil.copytree(path, copy)
    change(copy)
    by_author = change is not exchanged_key and read_registration(copy).public_key != published
    checked = check_folder(copy, public_key=None if by_author else published)
    if checked.problems:
        return checked.problems[0]
    assert checked.verdict is not None
    return checked.verdict.sentence if "no verdict" in checked.verdict.sentence else None
