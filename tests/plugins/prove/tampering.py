"""Ways to make a finished proof say something else; each must cost it its verdict."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
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

Change = Callable[[Path], None]
"""Changes a finished proof in a folder."""
Lines = Callable[[list[str]], list[str]]
"""Changes the raw data, one line for each block."""

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


def _edit_text(path: Path, before: str, after: str) -> None:
    path.write_text(path.read_text().replace(before, after))


def _edit_blocks(path: Path, change: Lines) -> None:
    (path / BLOCKS).write_text("\n".join(change((path / BLOCKS).read_text().splitlines())) + "\n")


def _edited(lines: list[str], number: int, change: Callable[[dict[str, Any]], None]) -> list[str]:
    block = json.loads(lines[number])
    change(block)
    return [*lines[:number], canonical(block).decode().strip(), *lines[number + 1 :]]


def _scaled(block: dict[str, Any], ratio: float, samples: slice) -> None:
    for sample in block["iterations"][samples]:
        sample[3] *= ratio


def edited_energy(path: Path) -> None:
    """Lower the energy of one iteration."""
    _edit_blocks(path, lambda lines: _edited(lines, 1, lambda block: _scaled(block, 0.9, slice(5, 6))))


def edited_manifest(path: Path) -> None:
    """Change the data and their digest."""
    edited_energy(path)
    _edit_json(path / MANIFEST, lambda values: values["sha256"].update({BLOCKS: sha256(path / BLOCKS)}))


def edited_page(path: Path) -> None:
    """Remove the mark of simulation from the page."""
    _edit_text(path / PAGE, "SIMULATED", "Measured")


def exchanged_key(path: Path) -> None:
    """Sign everything again with a key of one's own, with better data."""
    _sign_again(path, list)


def _sign_again(path: Path, change: Lines, *, after: Change | None = None) -> None:
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
        after(path)
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


def removed_repetition(path: Path) -> None:
    """As the author: leave out the round that replaced a void one, and sign."""
    _sign_again(path, lambda lines: lines[:-2])


def _swapped_arms(lines: list[str]) -> list[str]:
    """Call a full-speed block tuned."""
    other = {OURS: BASELINE_ARM, BASELINE_ARM: OURS}
    for number in (0, 1):
        lines = _edited(lines, number, lambda block: block.update(arm=other[block["arm"]]))
    return lines


def _moved(block: dict[str, Any]) -> None:
    """Use a block from before the registration."""
    shift_s = 5000.0
    block["begun_at_s"] -= shift_s
    block["ended_at_s"] -= shift_s
    for series, column in (("iterations", 1), ("gpu_power", 0)):
        for sample in block[series]:
            sample[column] -= shift_s


def _repeated(lines: list[str]) -> list[str]:
    """Use a good block twice."""
    tuned = [k for k, line in enumerate(lines) if json.loads(line)["arm"] == OURS]
    return [*lines[: tuned[1]], lines[tuned[0]], *lines[tuned[1] + 1 :]]


def smaller_design(path: Path) -> None:
    """As the author: register fewer rounds than the pilot asks for."""
    rounds = json.loads((path / REGISTRATION).read_text())["design"]["num_rounds"]
    _edit_json(path / REGISTRATION, lambda values: values["design"].update(num_rounds=rounds - 1))
    _sign_again(path, lambda lines: lines[:-2])


BY_AUTHOR: Mapping[str, Lines] = {
    "fewer rounds": lambda lines: lines[:-4],
    "swapped arms": _swapped_arms,
    "scaled counters": lambda lines: _edited(lines, 2, lambda block: _scaled(block, 0.8, slice(None))),
    "older block": lambda lines: _edited(lines, 0, _moved),
    "repeated block": _repeated,
}
"""Changes of raw data that the author makes before signing."""

TAMPERING: Mapping[str, Change] = {
    "edited registration": lambda path: _edit_json(path / REGISTRATION, lambda own: own.update(max_slowdown_ratio=0.5)),
    "edited energy": edited_energy,
    "removed block": lambda path: _edit_blocks(path, lambda lines: lines[:-1]),
    "removed pilot": lambda path: (path / "raw" / "pilot.jsonl").unlink(),
    "added file": lambda path: (path / "raw" / "more.jsonl").touch(),
    "edited manifest": edited_manifest,
    "edited verdict": lambda path: _edit_text(path / VERDICT, "-1", "-2"),
    "edited page": edited_page,
    "flattering page": lambda path: _sign_again(path, list, after=edited_page),
    "exchanged key": exchanged_key,
    "unfinished": lambda path: (path / MANIFEST).unlink(),
    **{name: partial(_sign_again, change=change) for name, change in BY_AUTHOR.items()},
    "smaller design": smaller_design,
}
"""Changes of a finished proof by what they do."""


def is_caught(path: Path, change: Change, copy: Path) -> str | None:
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
