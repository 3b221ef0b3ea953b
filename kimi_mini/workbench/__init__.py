"""Measuring and checking: what the scripts print, as functions that tests can call."""
