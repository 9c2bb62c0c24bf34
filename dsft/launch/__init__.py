"""`dsft launch`: a thin layer over the existing launchers. `launchers.py` reads and builds, `supervise.py` runs."""
