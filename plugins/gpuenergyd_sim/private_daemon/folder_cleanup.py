"""Helper process that removes a folder once all writers of its stdin are gone, even if the demo was killed."""

import shutil
import sys


def main() -> None:
    """Wait for the end of stdin, then remove the folder if it still exists."""
    sys.stdin.buffer.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
