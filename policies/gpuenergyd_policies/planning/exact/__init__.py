"""The exact time-energy frontier: tables, flow network and sweep."""
