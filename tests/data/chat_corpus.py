"""Chat templates that vendors publish, from the wheel of `trl`, with a small tokenizer for each, and ten chats."""

import json
import re
from functools import cache
from importlib.metadata import files, version
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    Path(file).stem: file.locate().read_text(encoding="utf-8")
    for file in sorted(files("trl") or [], key=str)
    if re.fullmatch(r"trl/chat_templates/(?!\w*_training)\w+\.jinja", str(file))
}
"""Name -> text."""
TRL = version("trl")

_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<(?:bos|eos|s|end_of_utterance|(?:start|end)_of_(?:turn|image))>|</s>|<\|?turn\|?>"
    r"|<\|?(?:tool_call|tool_response|tool|channel)\|>|<\|(?:tool_call|tool_response|tool|channel)>|\[/?INST\]|\[gMASK\]"
)
_END = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma": "<eos>",
    "diffusion": "<eos>",
    "gptoss": "<|return|>",
    "idefics3": "<|end_of_text|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "qwen": "<|im_end|>",
    "nemotron": "<|im_end|>",
}
"""Beginning of a template's name -> the end token of its models' tokenizers; <|endoftext|> for the rest."""


@cache
def tokenizer_for(name: str, text: str | None = None) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of bytes and of the special tokens that a template names.

    Args:
        text: in place of the published template called `name`.
    """
    template = text or TEMPLATES[name]
    end = next((end for start, end in _END.items() if name.startswith(start)), "<|endoftext|>")
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys([end, "<|bos|>", *_SPECIAL.findall(template)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token=end)
    fast.chat_template = template
    return fast


def _tool(name: str) -> dict:
    word = {"type": "string", "description": "A place."}
    parameters = {"type": "object", "properties": {"city": word}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"Says {name}.", "parameters": parameters}}


def _call(number: int, name: str, city: str) -> dict:
    function = {"name": name, "arguments": json.dumps({"city": city})}  # as text: OpenAI's shape
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _result(number: int, name: str, content: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "one turn": {"messages": [_user("Ask one?"), _assistant("Reply one.")]},
    "two turns": {
        "messages": [_user("Ask one?"), _assistant("Reply one."), _user("Ask two?"), _assistant("Reply two.")]
    },
    "system": {"messages": [{"role": "system", "content": "Be brief."}, _user("Ask one?"), _assistant("Reply one.")]},
    "reasoning": {"messages": [_user("Ask one?"), _assistant("Reply one.", reasoning_content="Muse one.")]},
    "reasoning twice": {
        "messages": [
            _user("Ask one?"),
            _assistant("Reply one.", reasoning_content="Muse one."),
            _user("Ask two?"),
            _assistant("Reply two.", reasoning_content="Muse two."),
        ]
    },
    "tool call": {
        "messages": [
            _user("Rain in Oslo?"),
            _assistant("", tool_calls=[_call(1, "weather", "Oslo")]),
            _result(1, "weather", "wet"),
            _assistant("It rains."),
        ],
        "tools": [_tool("weather")],
    },
    "two calls": {
        "messages": [
            _user("Rain and time in Oslo?"),
            _assistant("", tool_calls=[_call(1, "weather", "Oslo"), _call(2, "clock", "Oslo")]),
            _result(1, "weather", "wet"),
            _result(2, "clock", "noon"),
            _assistant("It rains at noon."),
        ],
        "tools": [_tool("weather"), _tool("clock")],
    },
    "text parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Ask "}, {"type": "text", "text": "one?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Reply one."}]},
        ]
    },
    "call with text": {
        "messages": [
            _user("Rain in Oslo?"),
            _assistant("Checking.", tool_calls=[_call(1, "weather", "Oslo")]),
            _result(1, "weather", "wet"),
            _assistant("It rains."),
            _user("Ask two?"),
            _assistant("Reply two."),
        ],
        "tools": [_tool("weather")],
    },
    "mixed thinking": {
        "messages": [
            _user("Ask one?"),
            _assistant("Reply one.", reasoning_content="Muse one."),
            _user("Ask two?"),
            _assistant("Reply two."),
        ]
    },
}
