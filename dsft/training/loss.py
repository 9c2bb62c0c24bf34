"""The training loss of every architecture, computed outside of the model: nats of the next tokens, times their weights
if they have some, summed over all micro batches and ranks of an optimizer step and divided once by the step's trained
tokens. (Divided by the sum of the weights, a step with weights of 0.5 would train like one with weights of 1.)

The model gets no labels: each architecture would normalise in its own way. A router's auxiliary loss, which the model
returns, is added in proportion to the micro batch's share of the step's tokens.

Shape suffixes: B batch, T time, N positions, V vocab.
"""

from collections.abc import Callable

import torch
from torch import nn

from dsft.errors import UserError
from dsft.models.adapters import unwrapped
from dsft.models.chunked_head import sums_of_nats
from dsft.units import IGNORED

AUX_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class TokenLoss:
    """Computes a micro batch's part of its step's loss. `label_smoothing`: the share of the target spread evenly over
    the vocabulary; `compute_loss`: the user's own loss.
    """

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0, compute_loss: Callable | None = None):
        inner = unwrapped(model)
        self.name = type(inner).__name__
        self.label_smoothing = label_smoothing
        self.compute_loss = compute_loss
        self.is_tiled = "accepts_label_weights" in vars(inner)
        self.aux_coefficient = 0.0
        for owner in (inner.config.get_text_config(), inner):
            for name in AUX_COEFFICIENTS:
                self.aux_coefficient = getattr(owner, name, self.aux_coefficient)

    def __call__(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], counts: torch.Tensor, step_counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a micro batch.

        Args:
            inputs: of the model, with `shift_labels` and perhaps `shift_weights`, at the positions that predict them.
            counts: [2], the micro batch's non-padding tokens and its trained tokens.
            step_counts: [2], the same of the optimizer step, over all micro batches and ranks.

        Returns:
            The micro batch's part of the step's loss (the sum over micro batches and ranks is the loss), and its sums,
            detached, [2]: the loss with weights and label smoothing or by `compute_loss`, and plain nats.

        Raises:
            UserError: if the model does not return logits for each token.
        """
        inputs = inputs | {"use_cache": False}
        targets_BT = inputs.pop("shift_labels")
        weights_BT = inputs.pop("shift_weights", None)
        if self.is_tiled:
            outputs = model(**inputs, targets=targets_BT, label_weights=weights_BT)
            sums = outputs["sums"]
        else:
            outputs = model(**inputs)
            sums = self._sums(getattr(outputs, "logits", None), targets_BT, weights_BT)
        loss = sums[0] / step_counts[1].clamp(min=1)
        aux_loss = outputs.get("aux_loss")
        if torch.is_tensor(aux_loss) and self.aux_coefficient:
            share = counts[0] / step_counts[0]
            loss = loss + self.aux_coefficient * aux_loss.to(loss.device) * share
        return loss, sums.detach()

    def _sums(
        self, logits_BTV: torch.Tensor | None, targets_BT: torch.Tensor, weights_BT: torch.Tensor | None
    ) -> torch.Tensor:
        if logits_BTV is None or logits_BTV.shape[:-1] != targets_BT.shape:
            raise UserError([f"model: {self.name} returns no logits for each token, so its loss cannot be computed"])
        logits_NV = logits_BTV.flatten(0, 1)
        targets_N = targets_BT.flatten().to(logits_NV.device)
        weights_N = None if weights_BT is None else weights_BT.flatten().to(logits_NV.device)
        if self.compute_loss is None:
            return sums_of_nats(logits_NV.float(), targets_N, weights_N, label_smoothing=self.label_smoothing)
        trained = torch.nonzero(targets_N != IGNORED).flatten()
        if not trained.numel():  # a blank micro batch, whose backward DeepSpeed runs as well
            return (0 * logits_NV.float().sum()).expand(2)
        weights_N = None if weights_N is None else weights_N[trained]
        logits_NV = logits_NV[trained].float()
        return sums_of_nats(logits_NV, targets_N[trained], weights_N, compute_loss=self.compute_loss)
