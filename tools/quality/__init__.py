"""Test quality: line coverage and mutation testing."""
