"""Remove a folder as soon as nobody holds the other end of stdin: what a killed demo could not do itself."""

import shutil
import sys


def main() -> None:
    """Wait for the end of stdin, then remove the folder if it is still there."""
    sys.stdin.buffer.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
