"""Ends a job cleanly on all nodes when any part of it fails, and names what failed first.

Each rank has a small process beside it, its sidecar (standard library and psutil only), which keeps running when the
rank hangs, is frozen or killed. Rank 0's sidecar also runs the coordinator, to which all sidecars report. `client.py`
is what the rank itself calls. `dsft launch` is tied to the job, and its guard ends its launcher where it is killed.

    rank 1 --- sidecar 1 --\
                            coordinator (in sidecar 0) --- dsft launch --- its guard
    rank 0 --- sidecar 0 --/

Before the rendezvous, the first sidecar of each node is connected to `dsft launch` itself.

Nothing here computes or moves training data.
"""
