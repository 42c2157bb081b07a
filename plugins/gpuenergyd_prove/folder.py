"""The folder of a proof, with registration, raw data, signatures and verdict; and the check of such a folder.

registration.json, registration.sig    before the first arm
raw/pilot.jsonl, raw/blocks.jsonl      one line per block, written when it has ended
raw/calibration.json                   switch latencies and the time of a driver call
manifest.json, manifest.sig            SHA-256 of all other files, after the last arm
verdict.json, report.html              recomputed by every check
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuenergyd import __version__
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd.printable import printable_line
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.page import proof_page
from gpuenergyd_prove.proof.measurements import Block, IterationSample, PowerSample
from gpuenergyd_prove.proof.plain_values import read_as, read_rows
from gpuenergyd_prove.proof.power_calculation import design
from gpuenergyd_prove.proof.registration import Registration, registration_of
from gpuenergyd_prove.proof.verdict import Verdict, gpu_energies_j, log_ratios, verdict
from gpuenergyd_prove.signing import SigningKey, is_signed

REGISTRATION, MANIFEST, VERDICT, PAGE = "registration.json", "manifest.json", "verdict.json", "report.html"
RAW = "raw"
PILOT, BLOCKS, CALIBRATION = f"{RAW}/pilot.jsonl", f"{RAW}/blocks.jsonl", f"{RAW}/calibration.json"
_SIGNATURES = {REGISTRATION: "registration.sig", MANIFEST: "manifest.sig"}
_UNLISTED = {MANIFEST, "manifest.sig"}
"""Files that the manifest does not list."""
_ROWS = ("iterations", "gpu_power", "meter_power")
"""The fields of a block that are written as lists of lists."""
_MAX_BYTES, _MAX_BLOCKS = 512 * 2**20, 1_000_000


@dataclass(frozen=True, slots=True)
class CheckedProof:
    """The result of a check: problems, or the verdict."""

    problems: tuple[str, ...]
    registration: Registration | None
    verdict: Verdict | None

    @property
    def holds(self) -> bool:
        """Whether the folder is unchanged since it was signed, and its verdict follows from its data."""
        return not self.problems


class ProofFolder:
    """The folder of a proof that is being run.

    Raises:
        UsageError: the folder exists, or cannot be created.
    """

    def __init__(self, path: Path, key: SigningKey) -> None:
        self.path, self._key = path, key
        try:
            path.mkdir(parents=True)
            (path / RAW).mkdir()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; must be a folder that does not exist yet") from None

    def write_calibration(self, values: Mapping[str, Any]) -> None:
        _write(self.path / CALIBRATION, canonical(values))

    def append(self, name: str, block: Block) -> None:
        with (self.path / name).open("ab") as stream:
            stream.write(canonical(block_values(block)))
            stream.flush()
            os.fsync(stream.fileno())

    def register(self, registration: Registration) -> str:
        """Write and sign the registration; return its SHA-256."""
        content = canonical(registration.to_dict())
        self._write_signed(REGISTRATION, content)
        return hashlib.sha256(content).hexdigest()

    def finish(self) -> Verdict:
        """Write verdict and page, computed from the files on disk, and sign everything; return the verdict."""
        registration = read_registration(self.path)
        found = verdict(registration, read_blocks(self.path / BLOCKS))
        _write(self.path / VERDICT, verdict_text(found))
        _write(self.path / PAGE, proof_page(registration, found.to_dict()).encode())
        digests = {name: sha256(self.path / name) for name in _files(self.path) if name not in _UNLISTED}
        self._write_signed(MANIFEST, canonical({"sha256": digests}))
        return found

    def _write_signed(self, name: str, content: bytes) -> None:
        _write(self.path / name, content)
        _write(self.path / _SIGNATURES[name], f"{self._key.sign(content)}\n".encode())


def verdict_text(found: Verdict) -> bytes:
    """Return the content of verdict.json, which depends only on the registration and the raw data."""
    return (json.dumps(found.to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_folder(path: Path, *, public_key: str | None = None) -> CheckedProof:
    """Check signatures and digests, recompute design and verdict, and compare the verdict byte for byte.

    The page is compared, too, if this version wrote it; other versions may word it differently.

    Args:
        path: the folder of a proof.
        public_key: the key published by the author; None trusts the one in the folder.

    Raises:
        UsageError: not the folder of a proof.
    """
    if not (path / REGISTRATION).is_file():
        raise UsageError(f"{path}: no {REGISTRATION}; must be the folder of a proof")
    try:
        registration = read_registration(path)
        problems = list(_signature_problems(path, registration, public_key))
        if problems:
            return CheckedProof(tuple(problems), registration, None)
        pilot, blocks = read_blocks(path / PILOT), read_blocks(path / BLOCKS)
        problems += _design_problems(registration, pilot, path)
        found = verdict(registration, blocks)
        recomputed = {VERDICT: verdict_text(found)}
        if dict(registration.versions).get("gpuenergyd") == __version__:
            recomputed[PAGE] = proof_page(registration, found.to_dict()).encode()
        problems += [
            f"{name} is not what the raw data give"
            for name, content in recomputed.items()
            if (path / name).read_bytes() != content
        ]
    except (ProofError, OSError) as error:
        return CheckedProof((printable_line(str(error)),), None, None)
    except (ArithmeticError, ValueError) as error:
        return CheckedProof((f"no verdict can be computed from the raw data: {error}",), registration, None)
    return CheckedProof(tuple(problems), registration, found)


def _signature_problems(path: Path, registration: Registration, public_key: str | None) -> Sequence[str]:
    key = registration.public_key
    if public_key is not None and public_key.lower() != key:
        return [f"signed with key {key[:16]}..., not with {public_key[:16]}..."]
    if not (path / MANIFEST).is_file():
        return [f"no {MANIFEST}: the proof was not finished"]
    for name, signature in _SIGNATURES.items():
        found = path / signature
        if not found.is_file() or not is_signed((path / name).read_bytes(), _text(found).strip(), key):
            return [f"{name} is not as it was signed"]
    digests = _values(path / MANIFEST).get("sha256")
    if not isinstance(digests, dict):
        return [f"{MANIFEST} has no digests"]
    names = {name for name in _files(path) if name not in _UNLISTED}
    if names != set(digests):
        return [f"{name} is {'missing' if name in digests else 'not signed'}" for name in sorted(names ^ set(digests))]
    return [f"{name} is not as it was signed" for name in sorted(names) if sha256(path / name) != digests[name]]


def _design_problems(registration: Registration, pilot: Sequence[Block], path: Path) -> Sequence[str]:
    """Recompute the number of rounds from the pilot, to check that nobody, not even the author, has chosen it."""
    own = registration.design
    if registration.pilot_sha256 != sha256(path / PILOT):
        return ["the pilot is not the registered one"]
    rounds = gpu_energies_j(pilot, len(registration.arms), registration.rules, own.block_iterations)
    recomputed = design(
        log_ratios(rounds, registration.claimed.name),
        block_iterations=own.block_iterations,
        smallest_saving_ratio=own.smallest_saving_ratio,
        max_rounds=own.num_rounds,
    )
    is_same = recomputed.num_rounds == own.num_rounds and recomputed.pilot_rounds == own.pilot_rounds
    return (
        []
        if is_same
        else [f"{count_text(own.num_rounds, 'round')} were registered; the pilot gives {recomputed.num_rounds}"]
    )


def read_registration(path: Path) -> Registration:
    """Return the registration of a folder.

    Raises:
        ProofError: it cannot be read.
    """
    return registration_of(_values(path / REGISTRATION))


def read_blocks(path: Path) -> tuple[Block, ...]:
    """Return the blocks of a file.

    Raises:
        ProofError: it cannot be read.
    """
    blocks = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        blocks.append(_block_of(_object(line, f"{path.name}:{number}"), f"{path.name}:{number}"))
        if len(blocks) > _MAX_BLOCKS:
            raise ProofError(f"{path.name} has more than {count_text(_MAX_BLOCKS, 'block')}")
    return tuple(blocks)


def block_values(block: Block) -> dict[str, Any]:
    return {
        "arm": block.arm,
        "begun_at_s": block.begun_at_s,
        "ended_at_s": block.ended_at_s,
        "iterations": [[s.index, s.begun_at_s, s.time_s, s.gpu_energy_j] for s in block.iterations],
        "gpu_power": [[s.at_s, s.power_w] for s in block.gpu_power],
        "meter_power": [[s.at_s, s.power_w] for s in block.meter_power],
        "losses": list(block.losses),
    }


def _block_of(values: Mapping[str, Any], where: str) -> Block:
    block = read_as(Block, {**values, **{name: [] for name in _ROWS}}, where)
    return replace(
        block,
        iterations=read_rows(IterationSample, values.get("iterations"), f"{where}: iterations"),
        gpu_power=read_rows(PowerSample, values.get("gpu_power"), f"{where}: gpu_power"),
        meter_power=read_rows(PowerSample, values.get("meter_power"), f"{where}: meter_power"),
    )


def canonical(values: Mapping[str, Any]) -> bytes:
    """Return one line of JSON that depends only on the values."""
    return (json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _values(path: Path) -> dict[str, Any]:
    return _object(_text(path), path.name)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProofError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ProofError(f"{where} is not a JSON object")
    return values


def _text(path: Path) -> str:
    """Return the text of a file of a proof, which anyone may have written."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ProofError(f"{path.name} is larger than {_MAX_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise ProofError(f"{path.name} is missing or cannot be read: {error}") from None


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
