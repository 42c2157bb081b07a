"""Tests of the timers of a training process."""
