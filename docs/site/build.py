"""Builds the site: copies the pages and pictures, replaces links out of docs/, and runs Sphinx."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from docs.site.generated import DOCS
from gpuenergyd import __version__

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_PARTS = {
    "For you": "readers",
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Decision records": "adr",
}
"""Captions of the navigation and their folders."""
_SETTINGS = {
    "project": "gpuenergyd",
    "version": __version__,
    "release": __version__,
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "myst_enable_extensions": ["deflist"],
    "html_theme": "furo",
    "html_title": f"gpuenergyd {__version__}",
    "html_show_sourcelink": False,
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "smartquotes": False,
    "html_extra_path": ["as-is"],
    "exclude_patterns": ["as-is"],
}


def without_links_out(source: Path) -> str:
    """Return the text of a page, with links to files outside the site replaced by their paths."""

    def plain(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        path = (source.parent / target).resolve()
        if "://" in target or not target or (path.is_relative_to(DOCS) and path.suffix in {".md", ".svg", ".png", ""}):
            return match[0]
        name = f"`{path.relative_to(DOCS.parent)}`"
        return name if match[1].strip("`").rpartition("/")[2] == path.name else f"{match[1]} ({name})"

    return _LINK.sub(plain, source.read_text(encoding="utf-8"))


def tables_of_contents() -> str:
    """Return the navigation: a part per folder, pages in the order in which the index links them."""
    linked = re.findall(r"\]\(([^)#\s]+)\.md", (DOCS / "index.md").read_text(encoding="utf-8"))
    parts = ["```{toctree}\n:hidden:\n\nresults\n```\n"]
    for caption, folder in _PARTS.items():
        there = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in (DOCS / folder).glob("*.md"))
        pages = list(dict.fromkeys([name for name in linked if name in there] + there))
        if folder == "adr":
            pages = ["adr/README"]
        parts.append("```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n")
    return "\n".join(parts)


def write_sources(folder: Path) -> None:
    """Write all pages and pictures into a folder for Sphinx."""
    for source in DOCS.rglob("*.md"):
        target = folder / source.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(without_links_out(source), encoding="utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n" + tables_of_contents())
    with (folder / "adr" / "README.md").open("a", encoding="utf-8") as index:
        index.write("\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n")
    for picture in (DOCS / "pictures").iterdir():
        # Sphinx copies the pictures of Markdown; those of HTML elements must be at the path that the page names.
        copies = [folder / "pictures"] + [folder / "as-is" / "pictures"] * (picture.suffix == ".svg")
        for copy in copies:
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, copy / picture.name)


def build_site(target: Path) -> Path:
    """Build the site, replace the target folder with it, and return the folder; warnings are errors."""
    with tempfile.TemporaryDirectory() as work:
        sources, built = Path(work, "sources"), Path(work, "site")
        sources.mkdir()
        write_sources(sources)
        with patch_docutils(), docutils_namespace():
            app = Sphinx(
                sources, None, built, Path(work, "doctrees"), "html",
                confoverrides=_SETTINGS, status=None, warning=sys.stderr, exception_on_warning=True,
            )  # fmt: skip
            app.build(force_all=True)
        shutil.rmtree(built / "_sources", ignore_errors=True)
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(built, target)
    return target
