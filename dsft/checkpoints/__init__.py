"""Saves, reads back, reshards and exports the files of a run; each is complete or missing."""
