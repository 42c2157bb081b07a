"""Measurements of a job: from its ranks' reports to baseline, savings and frontier."""
