"""Renders chats in their template, and finds the characters of an assistant's answers.

For each trained answer the chat is rendered twice: including the answer, and up to it with the generation prompt. The
answer is the difference, so the text before a trained answer is what a server feeds the model. An answer is trained in
the rendering of the whole chat if this has the same beginning, else in a separate sequence.

Templates are not parsed: neither their {% generation %} markers nor their roles are read.
"""

import contextlib
import functools
import json
import re
import string
from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import Chat, FormatRules, Message

# Raised by templates for chats that they cannot render.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Arguments that servers pass to templates for a generation prompt.
_SWITCHES = ({}, {"enable_thinking": True}, {"enable_thinking": False})
_EMPTY_THINKING = re.compile(
    r"(?:<(think|thinking|thought|seed:think)>\s*</\1>|<\|channel>thought\s*<channel\|>|\[THINK\]\s*\[/THINK\]"
    r"|<\|START_THINKING\|>\s*<\|END_THINKING\|>)\s*"
)
_THINKING_END = re.compile(r"(?:</(?:think|thinking|thought|seed:think)>|<channel\|>|\[/THINK\]|<\|END_THINKING\|>)\s*")
_THINKING_OPENS = re.compile(r"<think>\s*$")
_CLOSED_THINKING = "\n</think>\n\n"  # as templates write it after reasoning
_WAY_OUT = (
    "name a template that does with chat_template, take it out of the data, or set drop_unrendered: true, which leaves"
    " it out and counts such rows"
)

# Trained spans, as (start, end, weight); if they overlap, the weight of the later one counts.
Spans = list[tuple[int, int, float]]


@dataclass(kw_only=True)
class Rendered:
    text: str
    spans: Spans  # trained characters


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """An answer in the rendering that ends with it. Positions are indices of characters in `text`."""

    text: str
    prompt: str | None  # the generation prompt that `text` begins with; None if the template has none for it
    start: int  # of the trained characters
    end: int  # of the token that ends the turn, if there is one
    ends_open: bool  # whether no token in the text stops the model there


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Returns the tokens of a chat in the tokenizer's template, with the generation prompt."""
    forms = _forms(tokenizer, tokenizer.get_chat_template(), len(tokenizer))
    taken = [*map(forms.take, messages)]
    return tokenizer.apply_chat_template(taken, add_generation_prompt=True, return_dict=True)["input_ids"]


class ChatRenderer:
    """Renders a chat up to each of its answers, and finds its trained characters.

    Raises ValueError if the template leaves out a part of the chat, or any of TEMPLATE_ERRORS that it raises.
    """

    def __init__(self, chat: Chat, tokenizer: PreTrainedTokenizerBase, rules: FormatRules):
        self.source = chat.messages
        self.tools = chat.tools
        self.tokenizer = tokenizer
        self.rules = rules
        self.template = tokenizer.get_chat_template(tools=chat.tools or None)
        if rules.chat_date:  # transformers has no way to pass another date to a template
            day = date.fromisoformat(rules.chat_date)
            filters = ""
            for directive in (*string.ascii_letters, "-d", "-m"):
                filters += f"|replace('%{directive}', '{day:%{directive}}')"
            macro = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
            self.template = f"{macro}\n{self.template}"
        self.forms = _forms(tokenizer, self.template, len(tokenizer))
        self.notes = {}  # rendered_apart, unrendered, unprompted, empty_thinking -> why
        answers = [turn for turn, message in enumerate(self.source) if message["role"] == "assistant"]
        if rules.train_on == "last":
            answers = answers[-1:]
        self.wanted = []
        for turn in answers:
            if self.source[turn].get("weight", 1) and _parts_of(self.source[turn]):
                self.wanted.append(turn)
        self.whole = self.render(self.source)

    def render(self, messages: list[Message], *, prompt: bool = False, tools: bool = True, **switch: Any) -> str:
        if self.tools and tools:
            switch["tools"] = self.tools
        # A list of one chat: for a single chat transformers reads its first message, and before a first answer there
        # may be none.
        return self.tokenizer.apply_chat_template(
            [[*map(self.forms.take, messages)]],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=prompt,
            **switch,
        )[0]

    def sequences(self) -> list[Rendered]:
        """Returns the sequences of all wanted answers: of the whole chat, or of its beginnings up to an answer."""
        self.check_messages()
        whole = Rendered(text=self.whole, spans=[])
        if self.rules.train_on == "all":
            if any(message.get("weight", 1) != 1 for message in self.source):
                raise ValueError(
                    "a message has a weight, and train_on: all trains every token alike; use train_on: answers"
                )
            last = len(self.source) - 1
            if last in self.wanted and self.answer(last).ends_open:
                whole.text = self.closed(self.whole.rstrip())
            whole.spans = [(0, len(whole.text), 1)]
            return [whole]
        sequences = []
        for turn in reversed(self.wanted):
            answer = self.answer(turn)
            if answer.prompt is None:
                self.notes["unprompted"] = f"the chat template has no generation prompt for message {turn + 1}"
                continue
            for sequence in sequences or [whole]:
                span = self.place(answer, sequence.text)
                if span:
                    break
            else:  # the template renders it differently once the chat goes on
                sequence = Rendered(text=answer.text, spans=[])
                end = answer.end
                if answer.ends_open:
                    sequence.text = self.closed(answer.text[:end])
                    end = len(sequence.text)
                span = (answer.start, end)
            if sequence not in sequences:
                sequences.append(sequence)
            weight = self.source[turn].get("weight", 1)
            sequence.spans.insert(0, (*span, weight))
        if len(sequences) > 1:
            self.notes["rendered_apart"] = (
                f"{len(sequences)} sequences: the chat template renders answers otherwise once the chat goes on"
            )
        return sequences[::-1] or [whole]

    def closed(self, text: str) -> str:
        if self.tokenizer.eos_token is None:
            raise ValueError(
                "nothing in the chat template ends an answer, and the tokenizer has no end token, so the model would"
                " never stop; name another template with chat_template"
            )
        return text + self.tokenizer.eos_token

    def check_messages(self) -> None:
        """Raises ValueError, or adds a note, if the template leaves out tools or a message that is not trained."""
        if self.tools:
            without_tools = None
            with contextlib.suppress(*TEMPLATE_ERRORS):  # it needs tools, so it renders them
                without_tools = self.render(self.source, tools=False)
            if without_tools == self.whole:
                self.unrendered("the chat template does not render tools")
                return
        trains_all = self.rules.train_on == "all"
        for turn, message in enumerate(self.source):
            if turn in self.wanted and not trains_all:
                continue  # checked by `answer`
            is_answer = message["role"] == "assistant"
            for kind, part in _parts_of(message):
                if _find(part, self.whole) or (kind == "reasoning" and not trains_all):
                    continue
                # A template may shorten earlier answers, also on a server.
                if is_answer and not trains_all and _find(part, self.render(self.source[: turn + 1])):
                    continue
                self.unrendered(self.not_rendered(turn, kind))
                return

    def not_rendered(self, turn: int, kind: str) -> str:
        return f"message {turn + 1} ({self.source[turn]['role']}): the chat template does not render its {kind}"

    def unrendered(self, problem: str) -> None:
        if not self.rules.drop_unrendered:
            raise ValueError(f"{problem}; {_WAY_OUT}")
        self.notes["unrendered"] = problem

    def prompt_of(self, turn: int, text: str) -> str | None:
        """Returns the generation prompt that the rendering of an answer begins with, else that of the template."""
        first = None
        for switch in _SWITCHES:
            try:
                prompt = self.render(self.source[:turn], prompt=True, **switch)
            except TEMPLATE_ERRORS:  # for example, because no message precedes it
                return None
            if text.startswith(prompt):
                return prompt
            first = first or prompt
        return first

    def answer(self, turn: int) -> _Answer:
        text = self.whole
        if turn + 1 < len(self.source):
            text = self.render(self.source[: turn + 1])
        prompt = self.prompt_of(turn, text)
        parts = _parts_of(self.source[turn])
        thought = "".join(part for kind, part in parts if kind == "reasoning")
        train_thinking = self.rules.train_thinking
        trains_thinking = train_thinking in ("auto", "all")
        if train_thinking == "last":
            trains_thinking = turn == self.wanted[-1]
        start = content_start = 0
        opens = _THINKING_OPENS.search(prompt or "")
        header = self.header(prompt)
        position = -1
        if header:
            position = text.rfind(header, 0, text.rfind(parts[0][1]))
        if prompt and text.startswith(prompt):
            start = len(prompt)
            if not thought and train_thinking != "all":  # or the model would learn to skip thinking
                start = self.after_empty_thinking(text, start)
            content_start = start
        elif opens and text.startswith(prompt[: opens.start()]):
            # The template renders no reasoning, but its prompt opens it: insert the text that the model would generate.
            start = len(prompt)
            begin = f"{prompt}{thought}{_CLOSED_THINKING}"
            text = begin + text[opens.start() :].lstrip()
            content_start = len(begin)
        elif position >= 0:
            # The template renders earlier messages differently once there is an answer (gpt-oss: analysis).
            start = content_start = len(prompt)
            text = prompt + text[position + len(header) :]
        else:
            prompt = None
            header = ""
        spans = []
        for kind, part in parts:
            span = _find(part, text, start if kind == "reasoning" else content_start)
            if span is None and (kind != "reasoning" or trains_thinking):
                self.unrendered(self.not_rendered(turn, kind))
            elif span and kind == "reasoning":
                content_start = max(content_start, self.after_reasoning(text, span[1], header))
            if span:
                spans.append(span)
        if not spans:  # no part of the answer is rendered
            raise ValueError(f"{self.not_rendered(turn, parts[0][0])}; {_WAY_OUT}")
        if thought and not trains_thinking:
            start = content_start
        last = max(end for _, end in spans)
        stops = [*self.forms.special.finditer(text, last)]
        if len(stops) > self.forms.num_closing:
            stops = stops[: len(stops) - self.forms.num_closing]
        return _Answer(
            text=text,
            prompt=prompt,
            start=start,
            end=stops[-1].end() if stops else len(text.rstrip()),
            ends_open=not stops,
        )

    def header(self, prompt: str | None) -> str:
        """Returns the last special token of a generation prompt and the text after it; empty without such text."""
        marks = [*self.forms.special.finditer(prompt or "")]
        if not marks or not prompt[marks[-1].end() :].strip():
            return ""
        return prompt[marks[-1].start() :].strip()

    def after_empty_thinking(self, text: str, start: int) -> int:
        """Returns the end of an empty think block that begins before or at `start`, else `start`."""
        for match in _EMPTY_THINKING.finditer(text):
            if _EMPTY_THINKING.fullmatch(text, match.start(), start):
                return start  # the prompt closes it
            if match.end() > start and not text[start : match.start()].strip():
                self.notes["empty_thinking"] = "an empty think block is rendered and not trained"
                return match.end()
        return start

    def after_reasoning(self, text: str, end: int, header: str) -> int:
        """Returns where the answer starts after reasoning that ends at `end`; the model writes its channel itself."""
        position = text.find(header, end)
        if header and position >= 0:  # reasoning is a separate message (gpt-oss)
            return position + len(header)
        closing = _THINKING_END.search(text, end)
        return closing.end() if closing else end

    def place(self, answer: _Answer, text: str) -> tuple[int, int] | None:
        """Returns the span of an answer in the rendering of a longer chat; None if other text precedes it there."""
        trained = answer.text[answer.start : answer.end]
        for before in (answer.text[: answer.start], answer.prompt or ""):
            if not text.startswith(before + trained):
                continue
            end = len(before + trained)
            if answer.ends_open:  # the next turn may begin with the token that ends this one (GLM: <|user|>)
                follows = self.forms.follows.match(text, end)
                if not follows:
                    continue
                end = follows.end()
            return len(before), end
        return None


def _parts_of(message: Message) -> list[tuple[str, str]]:
    """Lists (kind, text) of all parts that must appear in the rendering of a message."""
    content = message["content"]
    thought = message.get("reasoning_content", "")
    if message["role"] == "assistant" and not thought and "</think>" in content:
        thought, content = content.split("</think>", 1)
        thought = thought.replace("<think>", "", 1)
    parts = [("reasoning", thought), ("content", content)]
    if message["role"] != "tool":  # a tool's name is that of its call
        parts.append(("name", message.get("name", "")))
    for call in message.get("tool_calls", []):
        parts.append(("tool call", call["function"]["name"]))
        values = call["function"]["arguments"].values()
        parts += [("tool call", value) for value in values if isinstance(value, str)]
    return [(kind, text.strip()) for kind, text in parts if text.strip()]


def _find(part: str, text: str, start: int = 0) -> tuple[int, int] | None:
    """Finds a part, also if it is escaped as in JSON; returns its start and end, or None."""
    for _ in range(3):
        position = text.find(part, start)
        if position >= 0:
            return position, position + len(part)
        part = json.dumps(part, ensure_ascii=False)[1:-1]
    return None


class _Forms:
    """The form of content that a template expects, found by rendering small messages, and its possible end tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self.special = re.compile(pattern)
        self.follows = re.compile(rf"\s*(?:{pattern})")

        def render(*messages):
            try:
                return tokenizer.apply_chat_template([[*messages]], chat_template=template, tokenize=False)[0]
            except TEMPLATE_ERRORS:
                return ""

        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": "answer"}
        self.parts = True
        in_parts = [self.take(question), self.take(answer)]
        # Content as a list of parts, else as text.
        self.parts = "question" not in render(question, answer) and "question" in render(*in_parts)
        if self.parts:
            question, answer = in_parts
        # Special tokens after an answer that appear only at the end of a chat (Phi-3: <|endoftext|>).
        text = render(question, answer)
        longer = render(question, answer, question)
        longer = longer[: longer.rfind("question")]
        alone = self.special.findall(text, text.rfind("answer"))
        followed = self.special.findall(longer, longer.rfind("answer"))
        num_shared = 0
        while num_shared < len(alone) and alone[: num_shared + 1] == followed[: num_shared + 1]:
            num_shared += 1
        self.num_closing = len(alone) - num_shared if num_shared else 0

    def take(self, message: Message) -> Message:
        message = {key: value for key, value in message.items() if key != "weight" and value is not None}
        if self.parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return message


@functools.lru_cache(maxsize=32)
def _forms(tokenizer: PreTrainedTokenizerBase, template: str, _num_tokens: int) -> _Forms:
    return _Forms(tokenizer, template)
