"""Ends a job cleanly on all nodes when any part of it fails, and names what failed first.

Each rank has a small process beside it (`sidecar.py`, standard library only), which goes on when the rank hangs, is
frozen or
killed. Rank 0's also runs the `hub.py`, to which all sidecars report; `watch.py` is what the rank itself calls;
`lifeline.py` ties
the job to `dsft launch`. Nothing here computes or moves training data.
"""
