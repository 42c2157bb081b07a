"""Proofs of savings: registration, power calculation, checks, verdict; `verdict` turns raw data into a conclusion."""
