"""Finds problems of a run's machines."""
