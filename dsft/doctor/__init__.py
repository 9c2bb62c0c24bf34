"""What is wrong with the machines of a run."""
