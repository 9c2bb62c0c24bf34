"""`dsft launch`: a thin front of the existing launchers. `options.py` reads, `commands.py` builds, `front.py` runs."""
