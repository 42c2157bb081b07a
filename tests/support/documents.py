"""Code blocks of the documentation; `python -m tests.support.documents FILE` prints the shell blocks as one script.

The option `--quick` omits slow blocks.

```sh         run by a test, in order, in a temporary folder, next to a simulated daemon
```sh slow    takes minutes or installs packages: run by `tools/ci/newcomer`
```sh host    needs root, systemd or a GPU: commands and options are checked, not run
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


def shell_script(path: Path, kinds: Collection[tuple[str, ...]] = ((),)) -> str:
    """Return the shell blocks of these kinds as one script that stops at the first failure and prints its position."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for block in blocks(path):
        if block.language == "sh" and block.words in kinds:
            lines += [f"echo '--- {path.name}:{block.line}' >&2", block.text]
    return "\n".join(lines)


def inline_commands(path: Path) -> Iterator[str]:
    """Yield every gpuenergyd command in a document, inline or in a shell block."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r"(?<!`)`(gpuenergyd [^`\n]+)`", _FENCE.sub("", text))
    for block in blocks(path):
        if block.language == "sh":
            joined = block.text.replace("\\\n", " ")
            yield from re.findall(r"^(?:sudo |until )?(?:\S*/)?(gpuenergyd [^\n|&;<>#$]+)", joined, flags=re.MULTILINE)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    is_quick = arguments[:1] == ["--quick"]
    for name in arguments[is_quick:]:
        print(shell_script(Path(name), ((),) if is_quick else ((), ("slow",))))  # noqa: T201  output of a command
