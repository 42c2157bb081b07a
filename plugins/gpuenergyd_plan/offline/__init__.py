"""Offline planner of the policy `bubble-aware`: from tables to a plan with its order, bound and figures."""
