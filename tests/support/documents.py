"""Code blocks of the documents; `python -m tests.support.documents FILE` prints the shell blocks as one script.

The option `--quick` omits slow blocks and comparisons of output.

```sh         run by a test, in order, in a temporary folder, next to a simulated daemon
```sh slow    takes minutes or installs packages: run by `tools/ci/newcomer`
```sh host    needs root, systemd or a GPU: commands and options are checked, not run

```text output          printed by the shell block above; a line `...` stands for lines that are left out
```text output numbers  the same with other numbers, and the line breaks and signs that follow from them
"""

import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: its language, the other words of its first line, and its position."""

    path: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str


def blocks(path: Path) -> tuple[Block, ...]:
    """Return the code blocks of a document in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match[1].split()
        found.append(Block(path, text[: match.start()].count("\n") + 1, language, tuple(words), match[2]))
    return tuple(found)


def shell_script(path: Path, kinds: Collection[tuple[str, ...]] = ((),), *, compares_output: bool = True) -> str:
    """Return the shell blocks of these kinds as one script that stops at the first failure and prints its position.

    The output of a block that the document shows is compared with what the document shows.
    """
    lines = ["set -euo pipefail", "printed=$(mktemp)", "exec 9>&1"]
    # Until bash's child has become the program, a signal makes it run this trap too, or is lost: only the script itself
    # ends the programs, and repeats the signal until they have ended.
    ended = "while kill $(jobs -p) 2>/dev/null; do sleep 0.1; done"
    lines.append(f'trap \'[ $BASHPID != $$ ] || {{ {ended}; cat "$printed" >&9; rm -f "$printed"; }}\' EXIT')
    listed = blocks(path)
    for block, following in zip(listed, (*listed[1:], None), strict=True):
        if block.language != "sh" or block.words not in kinds:
            continue
        lines.append(f"echo '--- {path.name}:{block.line}' >&2")
        if compares_output and following is not None and following.words[:1] == ("output",):
            check = f"python3 -m tests.support.documents --compare '{path}' {following.line} \"$printed\""
            lines += ['exec >"$printed"', block.text, 'exec >&9; cat "$printed"', check, ': >"$printed"']
        else:
            lines.append(block.text)
    return "\n".join(lines)


def missing_output(shown: Block, printed: str) -> str:
    """Return the first part of a shown output that was not printed; empty if everything was."""
    normalize = _without_numbers if "numbers" in shown.words else _without_trailing_space
    there = normalize(printed)
    parts: list[str] = re.split(r"^\.\.\.\n", shown.text, flags=re.MULTILINE)
    for part in filter(None, parts):
        _, found, there = there.partition(normalize(part))
        if not found:
            return part
    return ""


def _without_trailing_space(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _without_numbers(text: str) -> str:
    """Return a text without what numbers change: themselves, their signs in words, widths and line breaks."""
    text = text.replace("at the same speed", "0 % slower").replace(" than at full speed", "")
    text = re.sub(r"\b(?:less|more|slower|faster)\b", "other", text)
    text = re.sub(r"[-+]?\d[\d.,]*", "0", text)
    return " ".join(re.sub("─+", "─", text).split())


def inline_commands(path: Path) -> Iterator[str]:
    """Yield every gpuenergyd command in a document, inline or in a shell block."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r"(?<!`)`(gpuenergyd [^`\n]+)`", _FENCE.sub("", text))
    for block in blocks(path):
        if block.language == "sh":
            joined = block.text.replace("\\\n", " ")
            yield from re.findall(r"^(?:sudo |until )?(?:\S*/)?(gpuenergyd [^\n|&;<>#$]+)", joined, flags=re.MULTILINE)


def _compare(path: Path, line: int, printed: Path) -> int:
    shown = next(block for block in blocks(path) if block.line == line)
    missing = missing_output(shown, printed.read_text(encoding="utf-8"))
    if missing:
        sys.stderr.write(f"{path}:{line} shows what the block above did not print:\n{missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--compare"]:
        sys.exit(_compare(Path(arguments[1]), int(arguments[2]), Path(arguments[3])))
    is_quick = arguments[:1] == ["--quick"]
    for name in arguments[is_quick:]:
        kinds: tuple[tuple[str, ...], ...] = ((),) if is_quick else ((), ("slow",))
        print(shell_script(Path(name), kinds, compares_output=not is_quick))  # noqa: T201  output of a command
