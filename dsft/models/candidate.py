"""A model to score, as far as it is known before its weights are loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.models.build import described_in
from dsft.models.model_folder import adapter_base
from dsft.models.size import ModelFacts
from dsft.models.weights import adapter_problems, weight_problems


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Holds a model to score."""

    config: EvalConfig
    """The options with `model` being the one folder or hub id that is loaded."""
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts | None
    """Of the model, of its base where it is an adapter, with the format that it is loaded in."""

    @property
    def name(self) -> str:
        """Name the model in results: a format that is made while it loads follows a colon."""
        quantization = self.facts.size.quantization
        made = quantization is not None and not quantization.lies_on_disk
        return f"{self.config.model}:{quantization.format}" if made else self.config.model


def with_bases(model: str) -> Iterator[str]:
    """Yield the model, and the base of each adapter down to a full model."""
    yield model
    if base := adapter_base(described_in(model)):
        yield from with_bases(base)


def check_weights(candidate: Candidate, *, local: bool) -> list[str]:
    """Compare the weights that lie in a folder, or those of the hub, which are downloaded for it, with the config."""
    config, facts = candidate.config, candidate.facts
    base = adapter_base(described_in(config.model))
    problems = []
    if Path(base or config.model).exists() == local:
        problems += weight_problems(base or config.model, facts, revision=config.revision)
    if base and local:
        trust = config.trust_remote_code
        problems += adapter_problems(config.model, facts.config, key="model", trust_remote_code=trust)
    return problems
