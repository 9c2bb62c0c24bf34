"""What a piece of work takes of memory, by torch's own record."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocator_peak(run: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during `run()`: everything, inside operators and in
    mapped files too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in sorted(
        (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
