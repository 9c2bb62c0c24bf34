"""The loss that every architecture is trained on: nats of the next tokens, times their weights where they have some,
added up over all micro batches and ranks of an optimizer step and divided once, by the step's trained tokens. (By the
sum of the weights, a step of weight 0.5 alone would train as one of weight 1 does.)

transformers leaves the division to each model, and they disagree: some take the mean of a micro batch whatever they are
given, some do not shift labels. Here a model's `loss_function` is replaced, or the loss is computed from its logits.

What a model adds (a router's auxiliary loss) counts by the micro batch's share of the step's tokens. Terms that are no
mean over tokens, such as a router's load balance, still depend on how a step is cut into micro batches.

Shape suffixes: B batch, T time, V vocab.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from dsft.errors import UserError
from dsft.models.tiles import nats_of, next_tokens, own_nats_of
from dsft.models.trained import unwrapped
from dsft.runtime.console import say
from dsft.units import IGNORED

SAME_LOSS = 1e-3
"""Two losses of one micro batch that differ by less are the same but for rounding in half precision."""


class TokenLoss:
    """Computes a micro batch's part of the loss of its optimizer step.

    Args:
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
        num_sources: whose nats are added up apart; 0 where there is one.
        compute_loss: the user's own, in place of nats; which are counted all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        num_sources: int = 0,
        compute_loss: Callable | None = None,
    ):
        inner = unwrapped(model)
        self.name, self.label_smoothing, self.num_sources = type(inner).__name__, label_smoothing, num_sources
        self.compute_loss = compute_loss
        # Tiles and Liger compute the loss without logits, and divide by `num_items_in_batch`. Liger takes no weights.
        self.is_tiled = "accepts_loss_kwargs" in vars(inner)
        self.is_liger = inner.forward.__module__.startswith("liger_kernel")
        self.gives_labels, self.told_of_logits = True, False
        self._labels_BT = self._of_labels = self._divisor = self._nats = None
        inner.loss_function = self._loss_function

    def __call__(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], counts: torch.Tensor, step_counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a micro batch.

        Args:
            inputs: of the model, with the labels of its input tokens: position t is trained to predict label t + 1;
                and perhaps `weights` and `sources` of the labels. A share of a row (`data/epoch.py`) has them as
                `shift_labels`, `shift_weights` and `shift_sources`, at the positions that predict them.
            counts: the micro batch's tokens without padding, and its trained tokens.
            step_counts: the same of the optimizer step, over all micro batches and ranks.

        Returns:
            The loss, of which the sum over all micro batches and ranks is the step's: weighted nats per trained token,
            and what the model adds. And the micro batch's nats alone, detached: with weights and label smoothing, or of
            `compute_loss`; without; and of each source, NaN where they are not known.

        Raises:
            UserError: where the model has neither a loss that is replaced nor logits for each token.
        """
        inputs = dict(inputs)
        is_share = "shift_labels" in inputs
        before = "shift_" if is_share else ""
        labels_BT, weights_BT, sources_BT = (
            inputs.pop(f"{before}{name}", None) for name in ("labels", "weights", "sources")
        )
        next_BT = labels_BT
        if not is_share:
            next_BT = next_tokens(labels_BT, IGNORED)
            weights_BT, sources_BT = (None if each is None else next_tokens(each) for each in (weights_BT, sources_BT))
        share = counts[0] / step_counts[0]
        # A blank micro batch has a share of 0 and no nats.
        divisor = (step_counts[1] * share).clamp(min=1e-9)
        is_plain = not self.label_smoothing and self.compute_loss is None
        if is_plain and (self.is_tiled or (self.is_liger and weights_BT is None)):
            of_labels = {} if weights_BT is None else {"label_weights": weights_BT}
            if self.is_tiled and self.num_sources:
                of_labels |= {"label_sources": sources_BT, "num_sources": self.num_sources}
            labels = {"shift_labels": next_BT} if is_share else {"labels": labels_BT}
            outputs = model(**inputs, **labels, num_items_in_batch=divisor, **of_labels)
            nats = outputs["loss"].detach() * divisor
            if of_labels:
                return outputs["loss"] * share, torch.cat([nats.view(1), outputs["nats"]])
            unknown = nats.new_full((self.num_sources,), math.nan)  # Liger gives one sum for all labels
            return outputs["loss"] * share, torch.cat([nats.expand(2), unknown])
        if self.is_liger and weights_BT is not None and not self.told_of_logits:
            self.told_of_logits = True
            say("note: Liger's loss takes no weights of tokens; batches with weights take all logits")
        self._labels_BT, self._of_labels = labels_BT, (next_BT, weights_BT, sources_BT)
        self._divisor, self._nats = divisor, None
        given = {"labels": labels_BT} if self.gives_labels else {}
        # With logits Liger's forward calls `loss_function` (liger_kernel 0.8.5, all causal models).
        outputs = model(**inputs, **given, **({"skip_logits": False} if self.is_liger else {}))
        if self._nats is not None:  # the model called `loss_function`
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        else:  # it has a loss of its own, which it is not asked for any more
            model_loss = outputs.get("loss") if isinstance(outputs, dict) else None
            if model_loss is not None:
                model_loss, outputs["loss"] = model_loss.item(), None  # its graph goes before ours is made
            if self.gives_labels and getattr(outputs, "logits", None) is None:
                outputs = model(**inputs)
            logits_BTV = getattr(outputs, "logits", None)
            if logits_BTV is None or logits_BTV.shape[:-1] != labels_BT.shape:
                raise UserError(
                    [f"model: {self.name} returns no logits for each token, so its loss cannot be computed"]
                )
            loss, self.gives_labels = self._mean(logits_BTV), False
            if model_loss is not None:
                trained = (next_BT != IGNORED).sum()
                mean = (self._nats[1] / trained.clamp(min=1)).item()
                if trained and not is_share and abs(model_loss - mean) > SAME_LOSS * mean:
                    say(
                        f"note: {self.name} has a loss of its own ({model_loss:.4g} in the first micro batch), which is"
                        " not what is trained: that is, as in every architecture, the mean nats of the next tokens"
                        f" (here {mean:.4g}); what its own adds to these, such as a router's auxiliary loss, is left"
                        " out"
                    )
        nats = self._nats
        self._labels_BT = self._of_labels = self._divisor = self._nats = None
        return loss * share, nats

    def _loss_function(self, logits: torch.Tensor, labels: torch.Tensor | None, vocab_size: int, **options: Any):
        """Stands for the model's own, which gets the labels that the model was given. For other labels (of a token
        further on), and outside of training, it computes as transformers does.
        """
        if self._divisor is None:
            return ForCausalLMLoss(logits, labels, vocab_size, **options)
        targets = labels if options.get("shift_labels") is None else options["shift_labels"]
        if logits.shape[:-1] != targets.shape:
            return logits.new_zeros(())  # GIT cuts off an image that a text has not; its logits are taken instead
        if targets is not self._labels_BT:
            return ForCausalLMLoss(logits, labels, vocab_size, **(options | {"num_items_in_batch": self._divisor}))
        return self._mean(logits)

    def _mean(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        of_labels = [None if each is None else each.flatten().to(logits_BTV.device) for each in self._of_labels]
        if self.compute_loss is None:
            logits_NV = logits_BTV.float().flatten(0, 1)
            sums = nats_of(logits_NV, *of_labels, num_sources=self.num_sources, label_smoothing=self.label_smoothing)
        elif (trained := torch.nonzero(of_labels[0] != IGNORED).flatten()).numel():
            logits_NV = logits_BTV.flatten(0, 1)[trained].float()
            of_trained = (None if each is None else each[trained] for each in of_labels)
            sums = own_nats_of(self.compute_loss, logits_NV, *of_trained, num_sources=self.num_sources)
        else:  # a blank micro batch, which DeepSpeed takes the backward of all the same
            sums = (0 * logits_BTV.float().sum()).expand(2 + self.num_sources)
        self._nats = sums.detach()
        return sums[0] / self._divisor
