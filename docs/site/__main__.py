"""`python -m docs.site [FOLDER]`: builds the site; warnings are errors."""

import sys
from pathlib import Path

from docs.site.build import build_site

if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/docs")
    print("wrote", build_site(target) / "index.html")  # noqa: T201  output of a command
