"""`dsft launch`: a thin layer over the existing launchers. `options.py` reads, `commands.py` builds, `run.py` runs."""
