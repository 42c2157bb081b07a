"""Reports on the history: tables, JSON, CSV and an HTML page."""
