"""Identifiers and prose use the field's standard terms, not the private words of earlier versions.

The tables name every replaced word with its replacement, see docs/adr/0037-standard-terms.md. Words of the table may
still occur where another program defines them (zeusd's protocol, NVML, the standard library) and in the changelog.
"""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gpuenergyd", "policies", "trainers", "plugins", "tests", "benchmarks", "tools", "docs", "examples")
PRODUCT_FOLDERS = ("gpuenergyd", "policies", "trainers", "plugins")
THIS_FILE = "tests/project/test_names.py"
EXEMPT_FILES = (THIS_FILE, "CHANGELOG.md", "docs/adr/0037-standard-terms.md")

REPLACED_WORDS = {
    "giving_back": "release, restore",
    "given_back": "released, restored",
    "imposed": "straggler pace",
    "imposes": "straggler pace",
    "irregular": "disturbed",
    "judge": "evaluate",
    "judged": "evaluated",
    "judging": "evaluation",
    "keeper": "restore sentinel",
    "ledger": "attribution",
    "owed": "target",
    "owes": "target",
    "rung": "step",
    "rungs": "steps",
    "said": "message, output, reported",
    "spoken_of": "notify, log",
    "succession": "restart backoff",
    "tell": "notify, report",
    "tells": "notifies, reports",
    "told": "notified, reported",
    "fair_turns": "fair queue",
    "untuned": "full speed, baseline",
    "un_tuned": "full speed, baseline",
    "wish": "clock request, requested clock",
    "wishes": "clock requests",
    "would_be": "predicted",
    "would_save": "predicted saving",
}
"""Words of identifiers, between underscores, with their replacements."""

REPLACED_NAMES = {
    "agreement": "plan_windows",
    "extrinsic": "straggler_savings",
    "note": "record, notify",
    "say": "announce, log",
    "steady": "constant_slowdown",
    "take": "handle, acquire, apply",
    "term": "plan_window",
    "term_giver": "PlanWindowGrantor",
    "term_keeper": "PlanWindowFollower",
    "trials": "uniform_settings",
    "worth": "timing_value",
}
"""Whole names of modules, classes and functions with their replacements."""

REPLACED_MODULES = {
    "children": "gpu_worker",
    "error_memory": "error_correction",
    "keeping": "lease_handover",
    "local": "recent_dynamics",
    "merging": "merge",
    "model_memory": "past_jobs",
    "own": "zone_model",
    "parts": "pipeline_member",
    "peers": "peer_credentials",
    "prior": "pooled_prior",
    "restore_orders": "requests",
    "restore_rules": "policy",
    "restoring": "executor",
    "starting": "launch",
    "turns": "advisory_locks",
    "whole_pipeline": "pipeline_leader",
}
"""Names of modules, also of their tests, with their replacements."""

REPLACED_PREFIXES = {"take_": "handle_, acquire_, apply_", "note_": "record_"}
"""Prefixes of functions with their replacements."""

ALLOWED_PREFIXES = ("take_over", "take_snapshot")
"""Standard terms that begin with a replaced prefix."""

REPLACED_PHRASES = {
    r"the core (?:process|itself|alone|is killed|dies|hangs|hears|sends|asks|reads|checks)": "the daemon",
    r"wish(?:es|ed)?\b(?! to\b)": "clock request",
    r"\b(?:give|gives|gave|given|giving) (?:(?:it|them|clocks|GPUs|a|the|clock|GPU)\s)*back\b": "release, restore",
    r"\bput(?:s|ting)? (?:(?:it|them|clocks|GPUs|everything|all|what|every|the|GPU|is)\s)*back\b": "restore",
    r"\bowe[sd]?\b": "target",
    r"un-tuned": "at full speed, baseline",
    r"\bas asked\b": "target met",
    r"\bmended\b": "fixed",
    r"\bkeeper\b": "restore sentinel",
    r"taken for dead": "assumed dead",
    r"nonsense": "invalid",
    r"by hand of": "by",
    r"for ever\b": "forever, unlimited",
    r"\bas it stands\b": "unchanged",
    r"\bwhoever\b": "a noun",
    r"nobody answers": "fire-and-forget",
}
"""Regular expressions of phrases in prose, with their replacements."""


SHARED_CLASS_NAMES = {
    "_Hooks": "the callbacks of two frameworks, found by name in Lightning and in the Hugging Face Trainer"
}
"""Class names that product packages define twice, with the reason."""


def files(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if name not in EXEMPT_FILES and (ROOT / name).is_file()]


@cache
def python_files() -> tuple[Path, ...]:
    return tuple(files(*(f"{folder}/**.py" for folder in FOLDERS)))


class Scan(NamedTuple):
    """What the tests read in a program."""

    names: tuple[tuple[int, str, bool], ...]
    """Line, name and whether it is no variable, for every definition, the module included."""
    texts: tuple[tuple[int, str], ...]
    """Line and text of every string with a space."""
    classes: tuple[tuple[int, str], ...]
    """Line and name of every class of the module itself."""


@cache
def scan(path: Path) -> Scan:
    """Read a program once for all tests: that takes most of their time."""
    names: list[tuple[int, str, bool]] = [(1, path.stem, True)]
    texts: list[tuple[int, str]] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append((node.lineno, name, True))
            case ast.arg(arg=name):
                names.append((node.lineno, name, False))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name, False))
            case ast.Constant(value=str(text)) if " " in text:
                texts.append((node.lineno, text))
            case _:
                pass
    classes = tuple((node.lineno, node.name) for node in tree.body if isinstance(node, ast.ClassDef))
    return Scan(tuple(names), tuple(texts), classes)


@cache
def replacement(name: str, *, is_definition: bool = True) -> str | None:
    """Return what a name should use instead, or None where it uses no replaced word."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).strip("_").lower()
    if is_definition:
        if words in REPLACED_NAMES:
            return REPLACED_NAMES[words]
        for prefix, better in REPLACED_PREFIXES.items():
            if words.startswith(prefix) and not words.startswith(ALLOWED_PREFIXES):
                return better
    return next((better for word, better in REPLACED_WORDS.items() if f"_{word}_" in f"_{words}_"), None)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document, or the comments, docstrings and messages of a program."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        _, mark, comment = line.partition("# ")
        if mark and '"' not in comment:
            yield number, comment
    for first, value in scan(path).texts:
        yield from enumerate(value.splitlines(), start=first)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_identifier_uses_a_replaced_name(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {name} (use: {better})"
        for path in python_files()
        if path.is_relative_to(ROOT / folder)
        for line, name, is_definition in scan(path).names
        if (better := replacement(name, is_definition=is_definition)) is not None
    }

    assert sorted(found) == []


def test_no_module_has_a_replaced_name() -> None:
    stems = {path: path.stem.removeprefix("test_") for path in python_files()}
    found = {path.name: REPLACED_MODULES[stem] for path, stem in stems.items() if stem in REPLACED_MODULES}

    assert found == {}


@pytest.mark.parametrize("folder", [*FOLDERS, "systemd", "deploy", "."])
def test_no_prose_uses_a_replaced_phrase(folder: str) -> None:
    pattern = re.compile("|".join(f"(?:{phrase})" for phrase in REPLACED_PHRASES), re.IGNORECASE)
    patterns = (
        ("*.md", "*.toml", "Makefile")
        if folder == "."
        else (f"{folder}/**.py", f"{folder}/**.md", f"{folder}/**.toml", f"{folder}/**.service")
    )
    found = {
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in files(*patterns)
        if folder != "." or path.parent == ROOT
        for line, text in prose_of(path)
        if (match := pattern.search(text)) is not None
    }

    assert sorted(found) == []


def test_every_class_name_of_the_product_packages_has_one_meaning() -> None:
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for path in python_files():
        if path.relative_to(ROOT).parts[0] in PRODUCT_FOLDERS:
            for line, name in scan(path).classes:
                defined[name].append(f"{path.relative_to(ROOT)}:{line}")
    shared = {name: places for name, places in defined.items() if len(places) > 1}

    assert {name: places for name, places in shared.items() if name not in SHARED_CLASS_NAMES} == {}
    assert shared.keys() == SHARED_CLASS_NAMES.keys(), "names listed as shared that are not"
