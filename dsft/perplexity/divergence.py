"""Defines what is kept of a comparison with a reference model; `kl.py` computes it. Loads no library."""

from dataclasses import dataclass

COLUMNS = ("nats", "reference_nats", "kl", "reverse_kl", "same_top")
"""Rows of what `kl.score_pair` returns; the first is the model's own."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Holds how far a model's predictions are from those of a reference; means are over scored tokens."""

    reference: str
    reference_perplexity: float
    kl: float
    """Mean KL(reference || model) in nats."""
    reverse_kl: float
    """Mean KL(model || reference) in nats."""
    same_top: float
    """Share of the tokens where both find the same token likeliest."""
    change_quantiles: dict[str, float]
    """Share -> change of the true token's probability that so large a share of the tokens stays below."""

    def row(self) -> str:
        """Return it as text for the screen."""
        low, middle, high = (self.change_quantiles[share] for share in ("0.01", "0.5", "0.99"))
        return (
            f"KL(reference || model) {self.kl:.6f}, KL(model || reference) {self.reverse_kl:.6f} nats per token;"
            f" same likeliest token {self.same_top:.2%}; change of the true token's probability {low:+.4f} (1%),"
            f" {middle:+.4f} (median), {high:+.4f} (99%); perplexity of the reference {self.reference_perplexity:.4f}"
        )
