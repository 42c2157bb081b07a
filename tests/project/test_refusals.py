"""Every refusal of the code for several hosts and for stages of several ranks is provoked in a test that quotes it.

A line that no test has seen may be wrong, misleading, or never reached. The words of each `raise` and of each warning
must occur in a string of the tests: that of the line which a test expects.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "plugins/gpuenergyd_across_hosts/host/*.py",
    "gpuenergyd/daemon/jobs/replicas.py",
    "gpuenergyd/daemon/jobs/training_budget.py",
    "gpuenergyd/core/distributed/*.py",
    "gpuenergyd/core/job/description.py",
    "plugins/gpuenergyd_across_hosts/messages/patterns.py",
    "plugins/gpuenergyd_across_hosts/messages/compact_observations.py",
    "plugins/gpuenergyd_across_hosts/ranks/*.py",
    "trainers/gpuenergyd_trainers/joining/membership.py",
    "trainers/gpuenergyd_trainers/joining/place*.py",
    "trainers/gpuenergyd_trainers/megatron*.py",
    "trainers/gpuenergyd_trainers/deepspeed.py",
)
ERRORS = {"GpuEnergyError", "JobError", "ProtocolError", "TargetError", "UsageError"}
NUM_WORDS = 4
"""Words in a row that a test must quote, or all of a shorter text."""


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z_]+", re.sub(r"%[sdgr]|\\[a-zA-Z]", " ", text).lower())


def phrases(words: list[str], length: int) -> set[str]:
    return {" ".join(words[k : k + length]) for k in range(len(words) - length + 1)}


def quoted() -> str:
    """Return the words in the strings of all tests, in order."""
    texts = (text for path in ROOT.glob("tests/**/test_*.py") for text in re.findall(r'"([^"\n]+)"', path.read_text()))
    return f" {' '.join(word for text in texts for word in words_of(text))} "


def refusals() -> Iterator[tuple[str, list[str]]]:
    """Yield place and texts of each error and warning; an error that passes another one's text on has none."""
    for pattern in MODULES:
        for path in sorted(ROOT.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else node
                if not isinstance(call, ast.Call):
                    continue
                is_error = isinstance(node, ast.Raise) and isinstance(call.func, ast.Name) and call.func.id in ERRORS
                is_warning = isinstance(call.func, ast.Attribute) and call.func.attr == "warning"
                texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                if (is_error or is_warning) and texts:
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", texts


def test_every_refusal_is_quoted_by_a_test() -> None:
    known, missing = quoted(), []
    for place, texts in refusals():
        parts = [words_of(text) for text in texts]
        length = min(NUM_WORDS, max(map(len, parts)))
        if not any(f" {phrase} " in known for words in parts for phrase in phrases(words, length)):
            missing.append(f"{place}: {texts}")
    assert missing == []


@pytest.mark.parametrize(("text", "words"), [(r"tp_rank \d+ of 2", ["tp_rank", "of"]), ("%s: it", ["it"])])
def test_words_leave_out_what_varies(text: str, words: list[str]) -> None:
    assert words_of(text) == words
