"""Builds the site: combines written pages, generated pages and pictures, and runs Sphinx on them."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from docs.site.commands import command_line_page
from docs.site.entry_points import entry_points_page
from docs.site.http_api import http_api_page
from docs.site.metrics import metrics_page
from docs.site.pictures import pictures
from docs.site.python_api import python_api_page
from docs.site.settings import settings_page
from gpuenergyd import __version__

DOCS = Path(__file__).resolve().parents[1]
_STYLE = Path(__file__).with_name("style.css")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_SETTINGS = {
    "project": "gpuenergyd",
    "version": __version__,
    "release": __version__,
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "myst_enable_extensions": ["deflist"],
    "html_theme": "furo",
    "html_title": f"gpuenergyd {__version__}",
    "html_static_path": ["_static"],
    "html_css_files": ["pictures.css"],
    "html_show_sourcelink": False,
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "smartquotes": False,
    "exclude_patterns": ["_static"],
}


def reference_pages() -> dict[str, str]:
    """Return the pages generated from the code, by file name."""
    return {
        "command-line.md": command_line_page(),
        "settings.md": settings_page(),
        "http-api.md": http_api_page(),
        "metrics.md": metrics_page(),
        "entry-points.md": entry_points_page(),
        "python-api.md": python_api_page(),
    }


def without_links_out(source: Path) -> str:
    """Return the text of a page, with links to files outside the site replaced by their paths."""

    def plain(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        path = (source.parent / target).resolve()
        if "://" in target or not target or (path.is_relative_to(DOCS) and path.suffix in {".md", ""}):
            return match[0]
        if DOCS / "reference" in path.parents:
            return match[0]
        return f"{match[1]} (`{path.relative_to(DOCS.parent)}`)"

    return _LINK.sub(plain, source.read_text(encoding="utf-8"))


def write_sources(folder: Path) -> None:
    """Write all pages and pictures into a folder for Sphinx."""
    for source in DOCS.rglob("*.md"):
        target = folder / source.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(without_links_out(source), encoding="utf-8")
    with (folder / "adr" / "README.md").open("a", encoding="utf-8") as index:
        index.write("\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n")
    for name, text in reference_pages().items():
        (folder / "reference").mkdir(exist_ok=True)
        (folder / "reference" / name).write_text(text, encoding="utf-8")
    for name, text in pictures().items():
        (folder / "pictures").mkdir(exist_ok=True)
        (folder / "pictures" / name).write_text(f'<div class="picture">{text}</div>\n', encoding="utf-8")
    (folder / "_static").mkdir()
    shutil.copyfile(_STYLE, folder / "_static" / "pictures.css")


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
