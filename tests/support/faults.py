"""The faults that the daemon handles, and their page, generated from the tests that provoke them.

A test declares a fault with `@pytest.mark.fault(7)`; its name describes the recovery. `python -m tests.support.faults`
writes the page; a test fails while the page is out of date or a fault has no test.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "failure-modes.md"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what cannot be provoked without the hardware."""

    number: int
    description: str
    not_provoked: str | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """A test that provokes a fault."""

    path: Path
    name: str
    numbers: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """The rule that the test is named after, as a sentence."""
        words = [_SPELLED.get(word, word) for word in self.name.removeprefix("test_").split("_")]
        return " ".join((words[0][0].upper() + words[0][1:], *words[1:]))


_SPELLED = {"gpu": "GPU", "gpus": "GPUs", "http": "HTTP", "mig": "MIG", "nvml": "NVML"}
_NO_DRIVER = "only tested with the fake driver library, not with a real driver"

_DESCRIPTIONS = (
    "a training process is killed during an iteration",
    "a training process dies while its child keeps its sockets open",
    "a training process hangs",
    "the daemon is killed (also by the OOM killer) while clocks are lowered",
    "the daemon or one of its processes hangs",
    "all processes of the daemon are killed, or the host crashes",
    "a driver call never returns",
    "a GPU falls off the bus",
    "the driver denies permission",
    "a GPU does not support a call",
    "the driver is busy, times out or returns an unknown error",
    "the driver, its library or a function is missing, or versions do not match",
    "a GPU runs at another clock than the one set",
    "another program changes a GPU under our control",
    "a GPU was not at its defaults before the daemon started",
    "the energy counter is reset, runs backwards or is missing",
    "the power reading is an average, or stale",
    "the disk is full",
    "the database is locked by another program",
    "the database is damaged, foreign, or of a newer version",
    "the database's write-ahead log grows",
    "the carbon source is down",
    "the carbon source returns invalid data",
    "the carbon source responds too slowly, too much or with endless redirects",
    "the carbon source rejects requests: rate limit, invalid credentials",
    "the wall clock jumps",
    "the host sleeps and wakes up",
    "two jobs claim one GPU",
    "a job spans hosts, or its ranks follow different plans",
    "MIG is enabled",
    "persistence mode is off",
    "a message is malformed",
    "a message is too large",
    "a request never ends",
    "a client never reads its responses",
    "a client floods the daemon with requests or clock changes",
    "a client opens too many connections, or file descriptors run out",
    "a process id is reused",
    "a stale socket, a link or another file exists at the path of the socket",
    "the daemon is restarted or upgraded under running jobs",
    "a client runs in a container",
    "a user without permission sends requests",
    "an attacker plants links or writable files in trusted places",
    "a policy raises, loops, leaks or returns an invalid plan",
    "a plan is slower than predicted",
    "a straggler, a new tensor shape, an evaluation or a pause disturbs the profile",
    "clock requests are malicious",
    "the driver is reloaded or a GPU reset, and indices change",
    "reading the GPUs takes longer than the sampling period",
    "a setting is invalid",
    "many errors occur at once and flood the log",
    "the daemon runs for months",
    "a driver call for one GPU takes long or never returns while others need to be changed, restored or read",
    "the restore journal is damaged, of another format, or has values that cannot be right",
    "the driver reports success and a value that cannot be right",
    "the driver's binding raises an error that is not its own, for instance for a name that is not UTF-8",
    "a grid's generation is published in part, with storage, or with plant types of unknown intensity",
    "the key of a carbon source is for tests, and its values are made up",
    "names and reasons from users contain control characters, line breaks or formulas",
    "a user fills the history with jobs, changes of jobs or large tags",
    "the daemon or the GPU worker gets no CPU time for seconds",
    "a key, or the folder of locks, is open to other users",
)
_NOT_PROVOKED = {
    7: f"a sleeping call simulates one in uninterruptible sleep, {_NO_DRIVER}",
    8: _NO_DRIVER,
    29: "two network namespaces of one host simulate two hosts; no real network and no NCCL",
    31: "the fake driver library keeps locks after its last close; the test shows that it stays open under a lease",
    48: "the fake driver library does not permute indices; the test shows that GPUs are found by UUID after a reload",
    52: "hours of one GPU in virtual time, not months of a daemon",
}

FAULTS = tuple(Fault(n, description, _NOT_PROVOKED.get(n)) for n, description in enumerate(_DESCRIPTIONS, start=1))


def fault_id(number: int) -> str:
    """Return the id of a fault, as it appears in test ids; raise ValueError if there is no such fault."""
    if not 1 <= number <= len(FAULTS):
        raise ValueError(f"no fault {number!r}; there are 1 to {len(FAULTS)}")
    return f"F{number:02d}"


def proofs() -> tuple[Proof, ...]:
    """Return all tests that declare a fault, in the order of their files."""
    return tuple(proof for path in sorted((ROOT / "tests").rglob("test_*.py")) for proof in _proofs_in(path))


def page(found: tuple[Proof, ...]) -> str:
    """Return the text of docs/reference/failure-modes.md."""
    lines = [
        "# Failure modes and recovery",
        "",
        "Generated from the tests by `python -m tests.support.faults`: each line is the name of a test that",
        "provokes the fault. `pytest -k F07` runs all tests of one fault.",
        "",
        "| fault | failure | recovery, and the test that shows it |",
        "|---|---|---|",
    ]
    for fault in FAULTS:
        rules = [
            f"{proof.sentence} ([test](../../{proof.path.relative_to(ROOT)}))"
            for proof in found
            if fault.number in proof.numbers
        ]
        if fault.not_provoked:
            rules.append(f"*Limits of the test: {fault.not_provoked}.*")
        lines.append(f"| {fault_id(fault.number)} | {fault.description} | {'<br>'.join(rules)} |")
    return "\n".join(lines) + "\n"


def _proofs_in(path: Path) -> Iterator[Proof]:
    text = path.read_text(encoding="utf-8")
    if "mark.fault(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (numbers := _numbers(node)):
            yield Proof(path, node.name, numbers)


def _numbers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, ...]:
    calls = [
        d for d in function.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "pytest.mark.fault"
    ]
    return tuple(sorted(int(ast.literal_eval(argument)) for call in calls for argument in call.args))


if __name__ == "__main__":
    PAGE.write_text(page(proofs()), encoding="utf-8")
