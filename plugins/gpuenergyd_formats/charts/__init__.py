"""Charts of the HTML report, as inline SVG."""
