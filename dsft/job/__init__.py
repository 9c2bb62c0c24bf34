"""Starts a job on one machine or on the hosts of a file, and ends it on all of them when any part of it fails."""
