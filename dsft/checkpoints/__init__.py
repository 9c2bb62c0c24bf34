"""Keeps the files of a run, complete or not there: saving, reading back, resharding and exporting."""
