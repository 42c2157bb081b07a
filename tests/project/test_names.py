"""Words that would mislead a reader, and class names that would mean two things."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = ("gpuenergyd", "policies", "trainers", "plugins")
FOLDERS = (*PRODUCT_FOLDERS, "benchmarks", "tools", "docs", "examples", "systemd", "deploy")
EXEMPT = ("docs/adr/0037-standard-terms.md", "gpuenergyd/store/migrations/versions/r0007_standard_terms.py")

REPLACED = {
    r"(?:give|gives|given|giving)[_ ]back": "release, restore",
    r"keeper": "restore sentinel",
    r"ledger": "attribution",
    r"owe[ds]": "target",
    r"rungs?": "step",
    r"taken[_ ]for[_ ]dead": "assumed dead",
    r"un[_-]?tuned": "at full speed, baseline",
    r"wish(?:es)?(?! to\b)": "clock request",
}
"""Private words of earlier versions, in names and prose, with the terms that readers search for."""

SHARED_CLASS_NAMES = {
    "_Hooks": "the callbacks of two frameworks, found by name in Lightning and in the Hugging Face Trainer"
}
"""Class names that product packages define twice, with the reason."""


def lines(*folders: str) -> list[tuple[str, str]]:
    """Return the lines of programs and documents, each with its place."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = (
        (name, (ROOT / name).read_text(encoding="utf-8"))
        for name in names
        if name.endswith((".py", ".md", ".toml", ".service")) and name not in EXEMPT and (ROOT / name).is_file()
    )
    return [(f"{name}:{k}", line) for name, text in texts for k, line in enumerate(text.splitlines(), start=1)]


def test_no_name_and_no_prose_uses_a_replaced_word() -> None:
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(REPLACED)})(?![a-z])", re.IGNORECASE)
    found = [f"{place}: {match[0]}" for place, line in lines(*FOLDERS) if (match := pattern.search(line)) is not None]

    assert found == [], f"use instead: {REPLACED}"


def test_every_class_name_of_the_product_packages_has_one_meaning() -> None:
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for place, line in lines(*(f"{folder}/**.py" for folder in PRODUCT_FOLDERS)):
        if (match := re.match(r"class (\w+)", line)) is not None:
            defined[match[1]].append(place)

    assert {name for name, places in defined.items() if len(places) > 1} == SHARED_CLASS_NAMES.keys()
