"""The process and the machine it runs on: ranks, launcher variables, hardware, screen and logs."""
