"""The `dsft` command: one file per command, with its output."""
