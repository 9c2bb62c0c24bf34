"""Starts a job on one machine or on the hosts of a file, and ends it everywhere when any part fails."""
