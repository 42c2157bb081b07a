"""The 52 faults that this daemon has an answer to, and docs/faults.md, which is written from the tests that prove it.

A test claims a fault with `@pytest.mark.fault(7)`; its name is what we do. `python -m tests.support.faults` writes the
page; a test fails while it differs from the tests or a number has none.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and what of it cannot be made to happen without the hardware."""

    number: int
    happens: str
    not_provoked: str | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """A test that provokes a fault."""

    path: Path
    name: str
    numbers: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """What we do: the rule that the test is named after."""
        words = [_SPELLED.get(word, word) for word in self.name.removeprefix("test_").split("_")]
        return " ".join((words[0][0].upper() + words[0][1:], *words[1:]))


_SPELLED = {"gpu": "GPU", "gpus": "GPUs", "http": "HTTP", "mig": "MIG", "nvml": "NVML"}
_NO_DRIVER = "on the fake driver library, never on a real driver"

_HAPPENS = (
    "a training process is killed in mid-iteration",
    "a training process dies and a child of it keeps its sockets open",
    "a training process hangs",
    "the daemon is killed, or the kernel kills it for memory, while clocks are lowered",
    "the daemon or one of its processes hangs",
    "nothing of the daemon is left to restore, or the host crashes",
    "a driver call never returns",
    "a GPU falls off the bus",
    "the driver denies permission",
    "a GPU does not support a call",
    "the driver is busy, times out or answers with an unknown error",
    "the driver, its library or a function of it is missing, or versions do not match",
    "a clock is set and the GPU runs at another",
    "somebody else changes what we control",
    "a GPU was not at its defaults before us",
    "the energy counter is reset, runs backwards or is missing",
    "the power reading is an average, or stale",
    "the disk is full",
    "the database is locked by somebody else",
    "the database is damaged, foreign, or of a newer version",
    "the database's write-ahead log grows",
    "the carbon source is down",
    "the carbon source answers nonsense",
    "the carbon source drips, floods or redirects for ever",
    "the carbon source refuses: too many requests, bad credentials",
    "the wall clock jumps",
    "the host sleeps and wakes up",
    "two jobs claim one GPU",
    "a job spans hosts, or its ranks follow different plans",
    "MIG is enabled",
    "persistence mode is off",
    "a message is malformed",
    "a message is too large",
    "a request never ends",
    "a client never reads its answers",
    "a client floods the daemon with requests or clock changes",
    "a client opens connection after connection, or descriptors run out",
    "a process id is used again",
    "a stale socket, a link or a foreign file lies where the socket belongs",
    "the daemon is restarted or upgraded under running jobs",
    "a client lives in a container",
    "a user without permission asks",
    "links or writable files are put in the way of what the daemon trusts",
    "a policy raises, loops, leaks or answers nonsense",
    "a policy's plan is slower than promised",
    "a straggler, another shape, an evaluation or a pause disturbs the profile",
    "clock records are hostile",
    "the driver is reloaded or a GPU reset, and indices change",
    "reading the GPUs takes longer than the sampling period",
    "a setting is wrong",
    "everything goes wrong at once, and the log is flooded",
    "the daemon runs for months",
)
_NOT_PROVOKED = {
    7: f"a call that sleeps stands for one in uninterruptible sleep, {_NO_DRIVER}",
    8: _NO_DRIVER,
    29: "two network namespaces of one host stand for two hosts; no real network, and no NCCL",
    31: "the fake driver library keeps locks at its last close; shown is that there is no last close under a lease",
    48: "the fake driver library does not permute indices; every GPU is found by its UUID after a reload",
    52: "hours of one GPU in virtual time, and no month of a daemon",
}

FAULTS = tuple(Fault(n, happens, _NOT_PROVOKED.get(n)) for n, happens in enumerate(_HAPPENS, start=1))


def fault_id(number: int) -> str:
    """Return the name of a fault, as it stands in a test's id.

    Raises:
        ValueError: there is no such fault.
    """
    if not 1 <= number <= len(FAULTS):
        raise ValueError(f"no fault {number!r}; there are 1 to {len(FAULTS)}")
    return f"F{number:02d}"


def proofs() -> tuple[Proof, ...]:
    """Return every test that claims a fault, in the order of their files."""
    return tuple(proof for path in sorted((ROOT / "tests").rglob("test_*.py")) for proof in _proofs_in(path))


def page(found: tuple[Proof, ...]) -> str:
    """Return the text of docs/faults.md."""
    lines = [
        "# Faults, and what we do",
        "",
        "Written from the tests by `python -m tests.support.faults`: each line is the name of a test that makes the",
        "fault happen. `pytest -k F07` runs the proofs of one fault.",
        "",
        "| fault | what happens | what we do: the tests that prove it |",
        "|---|---|---|",
    ]
    for fault in FAULTS:
        rules = [
            f"{proof.sentence} ([test](../{proof.path.relative_to(ROOT)}))"
            for proof in found
            if fault.number in proof.numbers
        ]
        if fault.not_provoked:
            rules.append(f"*Not shown: {fault.not_provoked}.*")
        lines.append(f"| {fault_id(fault.number)} | {fault.happens} | {'<br>'.join(rules)} |")
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
