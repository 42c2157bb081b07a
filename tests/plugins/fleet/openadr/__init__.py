"""Tests of the OpenADR receiver."""
