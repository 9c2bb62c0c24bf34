"""From options and a machine to everything a run needs before weights load."""
