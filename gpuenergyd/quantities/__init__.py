"""What energy, cost and emissions mean: every quantity of reports and of the running daemon, defined once."""
