"""Loads and checks a model's tokenizer, sets its stop tokens, and generates text."""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import cached_file

from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.measure import max_positions
from dsft.models.model_folder import adapter_base, described_in, load_template, located, misnamed

TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tokenization_*.py")
MARKERS = "markers"  # in `add_tokens`: the markers of the chat template that the tokenizer splits
MARKER = r"<\|\w+\|>|<\w+_of_\w+>|<｜[\w▁]+｜>"  # the last is DeepSeek's, with wide bars
NO_ANSWERS = "its class {} has no generate of transformers (GenerationMixin), so it writes no answers"
REPEATED = 64  # tokens at the end of a text that repeat one phrase


def load_tokenizer(config: TrainConfig | EvalConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer as `check_tokenizer`; UserError has all its problems."""
    problems = []
    tokenizer = check_tokenizer(config, problems)
    raise_if_any(problems)
    return tokenizer


def check_tokenizer(
    config: TrainConfig | EvalConfig, problems: list[str], *, vocab_size: int | None = None
) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer and adds its problems to `problems`; None if it cannot be loaded."""
    key = "model"
    adapter = getattr(config, "adapter", None)
    if config.tokenizer:
        key = "tokenizer"
    elif adapter and _has_tokenizer(adapter):
        key = "adapter"
    source = getattr(config, key)
    revision = config.revision if key == "model" else None
    try:
        name, gguf = located(tokenizer_folder(source) if key == "model" else source)
        tokenizer = AutoTokenizer.from_pretrained(
            name, **gguf, revision=revision, trust_remote_code=config.trust_remote_code
        )
    except UserError as error:  # from an adapter's config: it names the file
        problems += error.problems
        return None
    except Exception as error:  # any, from transformers or the code of a repository
        problems.append(
            misnamed(key, source)
            or f"tokenizer: none found for {source}; set tokenizer to a hub id or a folder that has one"
            f" ({one_line(error)})"
        )
        return None
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # does not change the loss: padding is masked and has no label
    if config.chat_template:
        try:
            tokenizer.chat_template = load_template(config.chat_template)
        except ValueError as error:
            problems.append(f"chat_template: {error}")
    if tokenizer.pad_token_id is None:
        problems.append(
            f"tokenizer {tokenizer.name_or_path}: has neither a pad token nor an end token to pad with; add one to its"
            " files (tokenizer.pad_token = ..., save_pretrained)"
        )
    if vocab_size:
        problems += ids_beyond(tokenizer, vocab_size)
    return tokenizer


def save_problems(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Lists why a tokenizer cannot be saved: for example, a template's name is not a valid file name."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            return [f"tokenizer {tokenizer.name_or_path}: cannot be saved ({one_line(error)})"]
    return []


def tokenizer_folder(model: str) -> str:
    """Returns the folder of `model`'s tokenizer: for an adapter without tokenizer files, that of its base."""
    folder = described_in(model)
    if any(any(Path(folder).glob(pattern)) for pattern in TOKENIZER_FILES):
        return folder
    base = adapter_base(folder)
    return tokenizer_folder(base) if base else folder


def _has_tokenizer(adapter: str) -> bool:
    """Whether a tokenizer was saved with an adapter: the only one that has the tokens of its new rows."""
    try:
        return cached_file(adapter, TOKENIZER_CONFIG_FILE, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:  # `measure_model` reports a missing adapter
        return False


def ids_beyond(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Reports tokens for which a model of `vocab_size` rows has none; empty if there are none. Special tokens except
    padding do not count: Gemma 3 1B has no row for its image token. Data that contain one are refused (`check_ids`).
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.discard(tokenizer.pad_token_id)
    tokens = {number: token for token, number in tokenizer.get_vocab().items() if number not in special}
    largest = max(tokens, default=0)
    if largest < vocab_size:
        return []
    return [
        f"tokenizer {tokenizer.name_or_path}: has ids up to {largest} ({tokens[largest]}), but the model has embeddings"
        f" for {vocab_size}; use the model's own tokenizer, or, if this is it, a copy without the tokens beyond (in"
        " added_tokens of its files)"
    ]


def check_ids(tokens: np.ndarray | list[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises UserError if data or a prompt contain a token for which a model of `vocab_size` rows has none."""
    if max(tokenizer.get_vocab().values()) < vocab_size or not len(tokens):
        return  # without reading the tokens
    largest = int(np.max(tokens))
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise UserError(f"the model has no embedding for the token {token}; leave it out of the data, or of the prompt")


def add_tokens(tokenizer: PreTrainedTokenizerBase, wanted: list[str], problems: list[str]) -> list[int]:
    """Adds each text as one token, and markers as special ones; returns the ids of new tokens."""
    vocabulary = tokenizer.get_vocab()
    texts = [text for text in wanted if text != MARKERS]
    markers = []
    if blank := [text for text in texts if not text.strip()]:
        problems.append(f"add_tokens: {blank[0]!r} is not a text")
        return []
    if MARKERS in wanted:
        templates = str(tokenizer.chat_template)  # a text, or several by name (for tools)
        in_template = dict.fromkeys(re.findall(MARKER, templates))
        # Markers that the tokenizer splits into several tokens.
        markers = [text for text in in_template if len(tokenizer.tokenize(text)) > 1]
        if not in_template:
            problems.append(
                "add_tokens: markers: no chat template has any, such as <|user|>; set chat_template, or name the tokens"
            )
    special = [AddedToken(marker, special=True, normalized=False) for marker in markers]
    tokenizer.add_tokens(special, special_tokens=True)
    existing = {*vocabulary, *markers}
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts if text not in existing])
    return sorted(number for text, number in tokenizer.get_vocab().items() if text not in vocabulary)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    streamer: BaseStreamer | None = None,
) -> list[int]:
    """Continues a prompt while the model has positions and does not repeat itself; returns the new tokens' ids. The
    model must have positions for at least one more token than `ids`. `temperature`: 0 is greedy decoding.
    """
    text_config = model.config.get_text_config()
    check_ids(ids, tokenizer, text_config.vocab_size)
    positions = max_positions(text_config)
    if positions:
        max_new_tokens = min(max_new_tokens, positions - len(ids))
    prompt_BT = torch.tensor([ids], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature}
    if not temperature:  # those of the model's generation_config would warn
        sampling = {"do_sample": False, **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "typical_p"))}
    # A generation_config may set beams, which streamers do not support, several answers, or a dictionary.
    sampling |= {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    output_BT = model.generate(
        input_ids=prompt_BT,
        attention_mask=torch.ones_like(prompt_BT),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,  # for the stop_strings of a generation_config
        use_cache=True,  # whatever the model's config says
        synced_gpus=False,  # by default ranks under ZeRO-3 synchronise after each token until all are done
        streamer=streamer,
        # The prompt's tokens do not count.
        stopping_criteria=[lambda ids_BT, _: _is_repeating(ids_BT[0, len(ids) :].tolist())],
        **sampling,
    )
    return output_BT[0, len(ids) :].tolist()


def _is_repeating(ids: list[int]) -> bool:
    """Whether a text ends with many repetitions of a few tokens, as with greedy decoding of a small model."""
    tail = ids[-REPEATED:]
    periods = range(1, REPEATED // 4 + 1)
    return len(tail) == REPEATED and any(tail[period:] == tail[:-period] for period in periods)


def stop_at(model: PreTrainedModel, ends: Iterable[int]) -> list[int]:
    """Adds `ends`, the end tokens of trained answers, to the stop tokens of `model`, which are saved with it and read
    by servers; returns the added ones. A model that cannot generate has no stop tokens.
    """
    if not model.can_generate():
        return []
    stops = model.generation_config.eos_token_id
    if not isinstance(stops, list):
        stops = [] if stops is None else [stops]
    added = [token_id for token_id in ends if token_id not in stops]
    if added:
        stops = stops + added
        model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
    return added
