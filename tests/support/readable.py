"""JavaScript checks of a page in a browser: drawn charts, contrast, font sizes and overlapping labels."""


def drawn_marks(name: str) -> str:
    """Return JavaScript that counts the marks of a picture that can be seen within its frame."""
    return (
        f"(() => {{ const svg = [...document.querySelectorAll('svg.{name}')].find((s) => s.clientWidth > 0);"
        " const frame = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('path, circle, rect')].filter((mark) => { const box ="
        " mark.getBoundingClientRect(); return (box.width > 0 || box.height > 0) && box.left >= frame.left - 1"
        " && box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;"
        " }).length; })()"
    )


PALE = """[...document.querySelectorAll(
    'h1, h2, h3, p, dt, dd, td, th, .legend span, svg text.tick, svg text.title, svg text.axis-title')]
  .filter((each) => {
    const bright = (colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((c) => {
      const part = c / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    let behind = each; let paper = 'rgba(0, 0, 0, 0)';
    while (behind && paper === 'rgba(0, 0, 0, 0)') { paper = getComputedStyle(behind).backgroundColor;
      behind = behind.parentElement; }
    const style = getComputedStyle(each); const ink = bright(each.closest('svg') ? style.fill : style.color);
    const [low, high] = [ink, bright(paper)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map((each) => each.textContent)"""
"""JavaScript: texts whose contrast with what lies behind them is below 4.5, what WCAG 2.2 asks of small letters."""

SMALL = """[...document.querySelectorAll('svg text')].filter((each) => each.closest('svg').clientWidth > 0 &&
  parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a < 11).map((each) => each.textContent)"""
"""JavaScript: letters in pictures below eleven pixels."""

OVERLAPPING = """[...document.querySelectorAll('svg')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text.tick, text.title, text.axis-title')];
  if (!svg.clientWidth) return [];
  const boxes = texts.map((t) => t.getBoundingClientRect());
  return texts.flatMap((t, i) => texts.slice(i + 1).filter((u, k) => { const [a, b] = [boxes[i], boxes[i + 1 + k]];
    return a.left + 1 < b.right && b.left + 1 < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom; })
    .map((u) => `${svg.getAttribute('class')}: ${t.textContent} / ${u.textContent}`)); })"""
"""JavaScript: labels of pictures that lie over each other."""

OVERFLOWING = """(() => { const width = document.documentElement.clientWidth;
  const wide = document.documentElement.scrollWidth > width ? ['page'] : [];
  return wide.concat([...document.querySelectorAll('h1, h2, h3, p, li, dl, details, svg')].filter((each) =>
    !each.closest('.scroll, .sidebar-drawer, .toc-drawer') && each.getBoundingClientRect().right > width + 1)
    .map((each) => each.textContent.trim().slice(0, 60))); })()"""
"""JavaScript: parts of a page that are wider than the window, outside of frames that scroll and of hidden drawers."""

EMPTY_CHARTS = """[...document.querySelectorAll('svg')].filter((svg) => svg.clientWidth > 0).filter((svg) =>
  svg.getBoundingClientRect().height < 50 || !svg.querySelector('text.tick') || [...svg.querySelectorAll(
    'path:not(.reference), circle, rect:not(.bubble)')].filter((mark) => { const box = mark.getBoundingClientRect();
    return box.width > 1 || box.height > 1; }).length < 1).map((svg) => svg.getAttribute('aria-label'))"""
"""JavaScript: visible charts without an axis or without data."""
