"""Measurements of a job: from its ranks' reports to baseline, savings and frontier.

history            the iterations that a job keeps
knowledge          all measurements of a job: plans, iterations, estimators
measured_frontier  the time-energy points that a job has run at
rank_reports       assembles whole iterations from the ranks' reports
savings            baseline and measured saving, with an interval
"""
