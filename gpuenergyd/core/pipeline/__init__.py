"""Pipelines and plans: schedules, profiles, timelines and the SM clock of every instruction."""
