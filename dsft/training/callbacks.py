"""What a training shows and tells while it runs: the progress bar with one line per log, and the heartbeat."""

from tqdm.auto import tqdm
from transformers import TrainerCallback

from dsft.watchdog import client as watchdog

LOGGED = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "train_tokens_per_second": "tokens/s",
    "num_input_tokens_seen": "tokens",
    "eval_loss": "eval_loss",
    "eval_perplexity": "eval_perplexity",
    "eval_tokens": "eval_tokens",
    "peak_gpu_gib": "peak_gpu_gib",
    "peak_host_gib": "peak_host_gib",
}
"""Metric of the log -> its name in the line, in the line's order; other metrics are in run.json alone."""


class Heartbeat(TrainerCallback):
    """Tells the watchdog of each step; the first one may take as long as loading, since it compiles and allocates."""

    def on_substep_end(self, args, state, control, **kwargs):
        watchdog.heartbeat(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        watchdog.set_phase("training")
        watchdog.heartbeat(state.global_step)


class ProgressLog(TrainerCallback):
    """Shows one progress bar and one short line per log, on rank 0 only."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not args.disable_tqdm:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="Training", unit="step", dynamic_ncols=True
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            line = f"step {state.global_step:>6}  " + "  ".join(
                f"{label} {_number(logs[metric])}" for metric, label in LOGGED.items() if metric in logs
            )
            print(line, flush=True) if self.bar is None else self.bar.write(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
