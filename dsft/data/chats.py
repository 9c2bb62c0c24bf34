"""Renders chats in their template, and finds which stretches of the text are an assistant's.

The rule: answers are found in the rendered text. A chat is rendered twice, the second time with the letters of each of
its texts replaced by a private character of its own. White space, quotes and tags such as <think> stay, so templates
trim, split and escape both alike, and the two texts differ in those letters alone: they show where each text of each
message stands. No prefix of a rendering must match, and a text that the template leaves out is seen.

An answer begins where the generation prompt before it ends, and ends with the special token that ends its turn. It is
trained in the rendering of the whole chat where it stands there as the model would generate it: as in the rendering
that ends with it. Else it is trained in that one.

The exceptions follow the rule, each with its reason: templates that shorten earlier turns, mark answers themselves
({% generation %}), leave reasoning out or parse the words of a message.
"""

import json
import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import Environment, TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dsft.data.formats import Chat, FormatRules, Message
from dsft.models.chat_template import EXTENSIONS

# What templates raise at what they cannot render.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# The first of the private characters (planes 15 and 16 of Unicode), each of which stands for one text of a chat.
_MARK = 0xF0000
_KEPT = r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,}\]"  # tags, at which templates split
_LETTER = r"[^\s\"'&<>\\\[\x00-\x1f\x7f]"  # what no template trims or escapes
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_EMPTY_THINKING = re.compile(
    r"(?:<(think|thinking|thought|seed:think)>\s*</\1>|<\|channel>thought\s*<channel\|>|\[THINK\]\s*\[/THINK\]"
    r"|<\|START_THINKING\|>\s*<\|END_THINKING\|>)\s*"
)
_THINKING_END = re.compile(r"(?:</(?:think|thinking|thought|seed:think)>|<channel\|>|\[/THINK\]|<\|END_THINKING\|>)\s*")
_BORDER = re.compile(r"[\s>\]]")
_WAY_OUT = (
    "name a template that does with chat_template, take it out of the data, or set drop_unrendered: true, which leaves"
    " it out and counts such rows"
)

Spans = list[tuple[int, int, float]]
"""Stretches that are trained, as (start, end, weight); where they overlap, the weight of the later one holds."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of a sequence."""

    text: str
    spans: Spans  # characters that are trained
    ends_open: bool  # nothing in the text stops the model after the last span: the tokenizer's end token belongs there


class _Field(NamedTuple):
    """One text of a message: content, reasoning, name or tool call, of `size` letters."""

    message: int
    kind: str
    size: int


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an answer stands in a rendering: characters from `start` to `end` are trained."""

    begins: int  # where the text between it and the message before begins
    start: int
    last: int  # its last letter
    end: int = 0
    ends_open: bool = False  # nothing that stops generation ends it
    missing: tuple[str, ...] = ()  # its parts that are not rendered
    shape: str = ""  # what is rendered of it, with letters replaced, and without empty thinking
    empty_thinking: bool = False
    as_generated: bool = True


def render_chat(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, rules: FormatRules
) -> tuple[list[Rendered], dict[str, str]]:
    """Renders a chat, and finds which of its characters are trained.

    Returns:
        (sequences, of beginnings of the chat that end with an answer and of the whole chat; what became of the chat:
        rendered_apart, unrendered, empty_thinking -> why).

    Raises:
        ValueError: where the template leaves out a part of the chat, or leaves open which text is an answer.
        jinja2.TemplateError: where it raises.
    """
    finder = _Finder(chat, tokenizer, rules)
    return finder.sequences(), finder.notes


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Returns the tokens of a chat in the tokenizer's template, up to where the model answers."""
    taken = [*map(_forms(tokenizer, tokenizer.get_chat_template()).take, messages)]
    return tokenizer.apply_chat_template(taken, add_generation_prompt=True, return_dict=True)["input_ids"]


class _Rendering:
    """A text, and where the letters of each field of the chat stand in it."""

    def __init__(self, marked: str, fields: list[_Field], text: str = ""):
        # `marked` has the letters of fields replaced, `text` not; where there is none, only beginnings are looked at.
        self.marked, self.text, self.fields = marked, text or marked, fields
        codes = _codes(marked)
        is_mark = codes >= _MARK
        if text:  # a private character of the user's own stands in both
            is_mark &= codes != _codes(text)
        self.marks = np.flatnonzero(is_mark)
        self.owners = codes[self.marks] - _MARK  # [marks], which field each is of

    def of(self, index: int) -> np.ndarray:
        """Where the letters of a field stand; only those of the first copy, where a template repeats it."""
        return self.marks[self.owners == index][: self.fields[index].size]

    def after(self, position: int) -> str:
        """What stands between `position` and the next letter of any field, or the end of the text."""
        later = self.marks[np.searchsorted(self.marks, position, side="right") :]
        return self.marked[position + 1 : int(later[0]) if len(later) else len(self.marked)]

    @property
    def tail(self) -> str:
        """What stands after the last letter of any field."""
        return self.after(int(self.marks.max(initial=-1)))


class _Finder:
    """Finds the answers of a chat in its renderings."""

    def __init__(self, chat: Chat, tokenizer: PreTrainedTokenizerBase, rules: FormatRules):
        self.tokenizer, self.rules, self.tools = tokenizer, rules, chat.tools
        self.template = template = tokenizer.get_chat_template(tools=chat.tools or None)
        self.forms = _forms(tokenizer, template)
        self.source = chat.messages
        self.weights = [message.get("weight", 1) for message in chat.messages]
        turns = range(chat.answers_from, len(self.source))
        answers = [turn for turn in turns if self.source[turn]["role"] == "assistant"]
        # The turns that are trained.
        self.wanted = [turn for turn in answers[-1 if rules.train_on == "last" else 0 :] if self.weights[turn]]
        self.notes: dict[str, str] = {}
        self.fields, self.marked = _mark(chat.messages)
        # Turn -> the marked rendering that ends with it, and the end of the generation prompt before it.
        self.alone: dict[int, _Rendering] = {}
        self.prompts: dict[int, str] = {}

    # Rendering

    def _render(self, messages: list[Message], *, tools: bool = True, prompt: bool = False) -> str:
        # A list of one chat: transformers looks into the first message of a chat alone, and there may be none before a
        # first answer.
        return self.tokenizer.apply_chat_template(
            [[*map(self.forms.take, messages)]],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=prompt,
            **({"tools": self.tools} if self.tools and tools else {}),
        )[0]

    def rendering(self, length: int) -> _Rendering:
        """Renders the first messages, and checks that the marked text differs from theirs in letters alone."""
        text = self._render(self.source[:length])
        # A template that compares words of a message with its own renders it otherwise without them: these stay then.
        for kept in ((), self.forms.constants):
            fields, marked = _mark(self.source, kept=kept) if kept else (self.fields, self.marked)
            try:
                again = self._render(marked[:length])
            except TEMPLATE_ERRORS:
                continue  # a template that parses the words
            if len(again) != len(text):
                continue
            rendering = _Rendering(again, fields, text)
            same = _codes(again) == _codes(text)
            same[rendering.marks] = True
            if same.all():
                if kept:
                    self.fields, self.marked, self.alone, self.prompts = fields, marked, {}, {}
                return rendering
        raise ValueError(
            "the chat template renders a message by its words, so answers cannot be distinguished from other text; name"
            " another one with chat_template, or use prompt and completion columns"
        )

    def _alone(self, turn: int) -> _Rendering:
        if turn not in self.alone:
            self.alone[turn] = _Rendering(self._render(self.marked[: turn + 1]), self.fields)
        return self.alone[turn]

    # The rule: where an answer begins and ends

    def place(self, turn: int, length: int, rendering: _Rendering) -> _Place | None:
        """Finds an answer in the rendering of the first `length` messages; None where nothing of it is there."""
        place = self._begin(turn, rendering)
        if place is None:
            return None
        is_last = length == turn + 1
        alone = rendering if is_last else self._alone(turn)
        in_alone = place if is_last else self._begin(turn, alone)
        # What follows the last letter where the chat ends with the answer, and where it goes on; both end the turn.
        tail = alone.marked[in_alone.last + 1 :] if in_alone else ""
        follows = self._followed(turn) if is_last else rendering.after(place.last)
        same = _common(tail, follows)
        if not is_last and follows == tail:  # nothing of the messages after it is rendered (drop_unrendered)
            same = _common(tail, self._followed(turn))
        special, added = self.forms.special, self.forms.added
        ends_open = False
        if match := _last(special, tail[:same]):
            end, ends_alike = match.end(), True
        elif match := _last(special, tail):  # only the last turn ends with it, as gpt-oss' <|return|>
            match = match if is_last else special.search(follows)
            end, ends_alike = match.end() if match else same, is_last
        elif not is_last and (match := special.match(follows, len(follows) - len(follows[same:].lstrip()))):
            end, ends_alike = match.end(), True  # the next turn begins with what ends this one, as GLM's <|user|>
        elif (match := _last(added, tail)) and not tail[match.end() :].strip():  # a token that is not called special
            end, ends_alike = min(match.end(), len(tail) if is_last else same), is_last or match.end() <= same
        else:  # a preset on a tokenizer without its tokens: only in a sequence that ends with it can a token be added
            end, ends_alike, ends_open = len(tail[: None if is_last else same].rstrip()), is_last, True
        is_alike = in_alone is not None and place.shape == in_alone.shape and ends_alike
        return replace(
            place,
            end=place.last + 1 + end,
            ends_open=ends_open,
            as_generated=not place.missing and is_alike and place.as_generated,
        )

    def _begin(self, turn: int, rendering: _Rendering) -> _Place | None:
        how = self.rules.train_thinking
        trains_thinking = how in ("auto", "all") or (how == "last" and self.wanted[-1:] == [turn])
        kinds = {index: field.kind for index, field in enumerate(self.fields) if field.message == turn}
        at = {index: rendering.of(index) for index in kinds}
        cut = [kind for index, kind in kinds.items() if len(at[index]) < self.fields[index].size]
        missing = tuple(dict.fromkeys(kind for kind in cut if trains_thinking or kind != "reasoning"))
        answer = [index for index, kind in kinds.items() if len(at[index]) and kind != "reasoning"]
        thought = [index for index, kind in kinds.items() if len(at[index]) and kind == "reasoning"]
        if not answer and not (thought and not missing):
            return None
        places = np.concatenate([at[index] for index in answer + thought])
        first, last = int(places.min()), int(places.max())
        before = rendering.marks[: np.searchsorted(rendering.marks, first)]
        begins = int(before[-1]) + 1 if len(before) else 0
        start = begins + self._prompt_end(turn, rendering.marked[begins:first])
        empty = None if thought else _last(_EMPTY_THINKING, rendering.text[begins:first])
        if empty and self.rules.train_thinking != "all":  # else the model would learn to skip thinking
            start = max(start, begins + empty.end())
        if answer and not (thought and trains_thinking):
            answered = int(min(at[index].min() for index in answer))
            content = self._content_start(turn, rendering, answered)
            start = min(start, content)
            if thought:  # all that follows it is the answer's, also what opens a call, or a channel
                after, prompt = int(max(at[index].max() for index in thought)) + 1, self.prompts.get(turn, "")
                between, opens = rendering.marked[after:answered], _last(self.forms.special, prompt)
                header = prompt[opens.start() :].strip() if opens else ""
                if header and header in between:  # reasoning is a message of its own, as gpt-oss'
                    start = after + between.rindex(header) + len(header)
                elif closing := _THINKING_END.search(between):
                    start = after + closing.end()
                else:
                    start = content
        inside = rendering.owners[(rendering.marks >= first) & (rendering.marks <= last)]
        return _Place(
            begins=begins,
            start=start,
            last=last,
            missing=missing,
            shape=_EMPTY_THINKING.sub("", rendering.marked[start : last + 1]),
            empty_thinking=bool(empty),
            as_generated=all(self.fields[index].message == turn for index in np.unique(inside)),
        )

    def _prompt_end(self, turn: int, between: str) -> int:
        """Counts the characters before an answer that are the generation prompt's."""
        try:
            if turn not in self.prompts:
                self.prompts[turn] = _Rendering(self._render(self.marked[:turn], prompt=True), self.fields).tail
            tail = self.prompts[turn]
            same = _common(tail, between)
        except TEMPLATE_ERRORS:  # there is no message before, or none that a prompt may follow: that of a question
            fields, marked = _mark([{"role": "user", "content": "question"}])
            try:
                tail = _Rendering(self._render(marked, prompt=True), fields).tail
            except TEMPLATE_ERRORS:
                return len(between)
            match = SequenceMatcher(None, tail, between, autojunk=False).find_longest_match()
            tail, same = tail[match.a :], match.b + match.size
        if between[:same].endswith(tail):
            return same
        # The prompt goes on otherwise, with <think> say: the "<t" of a <tool_call> is not the prompt's.
        return match.end() if (match := _last(_BORDER, between[:same])) else 0

    def _content_start(self, turn: int, rendering: _Rendering, first: int) -> int:
        """Returns where the content begins whose first letter stands at `first`: quotes or tags may stand before it."""
        marked = (self.marked[turn].get("content") or "").split("</think>", 1)[-1].strip()
        lead = "".join(takewhile(lambda char: ord(char) < _MARK, marked))
        return first - len(lead) if rendering.marked[:first].endswith(lead) else first

    def _followed(self, turn: int) -> str:
        """Returns what follows an answer's last letter where another message does."""
        calls = self.source[turn].get("tool_calls")
        result = {"role": "tool", "content": "found"}
        if calls:
            result |= {"name": calls[0]["function"]["name"], "tool_call_id": calls[0].get("id", "")}
        # The first that the template renders.
        for following in [result] * bool(calls) + [{"role": "user", "content": "question"}]:
            fields, marked = _mark([*self.source[: turn + 1], following])
            try:
                rendering = _Rendering(self._render(marked), fields)
            except TEMPLATE_ERRORS:
                continue
            lasts = [0, 0]  # letters of the turn and of what follows it, where both are rendered
            for index, field in enumerate(fields):
                if field.message >= turn:
                    lasts[field.message - turn] = int(rendering.of(index).max(initial=lasts[field.message - turn]))
            if all(lasts):
                return rendering.after(lasts[0])
        return self._alone(turn).tail

    def sequence(self, rendering: _Rendering, places: dict[int, _Place], length: int) -> Rendered:
        """The rendering of the first `length` messages, with the answers at `places` trained; where the template marks
        answers with {% generation %}, that is trained, the last stretch of it up to what ends the answer.
        """
        text, spans, ends_open, stretches = rendering.text, [], False, None
        if places and self.rules.train_on != "all" and _GENERATION.search(self.template):
            # Only the stretches are taken from transformers: its mask of tokens loses turns where a tokenizer trims
            # offsets.
            _, (stretches,) = render_jinja_template(
                [[*map(self.forms.take, self.source[:length])]],
                tools=self.tools or None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        for turn, place in places.items():
            inside = [(place.start, place.end)]
            if stretches is not None:
                of_answer = [(a, b) for a, b in stretches if a <= place.last and b > place.begins and b > a]
                if not of_answer:
                    problem = "the chat template marks other text as generated, and nothing of this answer"
                    raise ValueError(f"message {turn + 1}: {problem}")
                inside = [(max(start, place.start), end) for start, end in of_answer if end > place.start]  # no prompt
                inside[-1] = (inside[-1][0], max(place.end, place.last + 1))
            spans += [(start, end, self.weights[turn]) for start, end in inside]
            if place.ends_open and turn == length - 1:  # what follows is no answer's: white space, say
                text, ends_open = text[: place.end], True
        return Rendered(text=text, spans=spans, ends_open=ends_open)

    # Sequences, with the exceptions

    def sequences(self) -> list[Rendered]:
        """Makes the sequences of all wanted answers; raises, or notes, where the template leaves out a part of the
        chat.
        """
        length, rules, trains_all = len(self.source), self.rules, self.rules.train_on == "all"
        rendering = self.rendering(length)
        problems = []
        if self.tools:
            try:
                if self._render(self.source, tools=False) == rendering.text:
                    problems.append("the chat template does not render tools")
            except TEMPLATE_ERRORS:
                pass  # it needs them: they are rendered
        for index, field in enumerate(self.fields):
            # A trained answer is looked for where it is trained.
            is_looked_for_later = field.message in self.wanted and not rules.keep_all
            if not trains_all and (is_looked_for_later or field.kind == "reasoning"):
                continue
            is_there = len(rendering.of(index)) >= field.size
            # An assistant's turn that is not trained must stand in a rendering that ends with it: from there on, it is
            # the template's to shorten, as it does for a server.
            if not is_there and self.source[field.message]["role"] == "assistant" and not trains_all:
                is_there = len(self._alone(field.message).of(index)) >= field.size
            if not is_there:
                problems.append(self._not_rendered(field.message, field.kind))
        if problems and not rules.drop_unrendered:
            raise ValueError(f"{problems[0]}; {_WAY_OUT}")
        if problems:
            self.notes["unrendered"] = problems[0]
        if trains_all:
            return [self.all_trained(rendering)]
        sequences, wanted = [], self.wanted
        while wanted:
            places = {turn: self.place(turn, length, rendering) for turn in wanted}
            here = {
                turn: place
                for turn, place in places.items()
                # An evaluation scores the one rendering that there is (keep_all).
                if place and (place.as_generated or (rules.keep_all and "content" not in place.missing))
            }
            if rules.keep_all or here:
                sequences.append(self.sequence(rendering, here, length))
            elif length == wanted[-1] + 1:
                sequences.append(self.not_whole(wanted[-1], rendering, places[wanted[-1]]))
                here = {wanted[-1]: places[wanted[-1]]}
            if rules.train_thinking != "all" and any(place.empty_thinking for place in here.values()):
                self.notes["empty_thinking"] = "an empty think block is rendered and not trained"
            wanted = [] if rules.keep_all else [turn for turn in wanted if turn not in here]
            if wanted:  # the template renders them otherwise once the chat goes on
                length = wanted[-1] + 1
                rendering = self.rendering(length)
        sequences = sequences or [self.sequence(rendering, {}, length)]
        if len(sequences) > 1:
            self.notes["rendered_apart"] = (
                f"{len(sequences)} sequences: the chat template renders answers otherwise once the chat goes on"
            )
        return sequences[::-1]

    def _not_rendered(self, turn: int, *kinds: str) -> str:
        role = self.source[turn]["role"]
        return f"message {turn + 1} ({role}): the chat template does not render its {' and '.join(kinds)}"

    def not_whole(self, turn: int, rendering: _Rendering, place: _Place | None) -> Rendered:
        """Makes the sequence of an answer that the template does not render whole as the last message: where only
        reasoning is missing and the generation prompt opens it with <think>, what the model would generate after that
        prompt; else, if that is asked for, without what is missing.
        """
        kinds = dict.fromkeys(field.kind for field in self.fields if field.message == turn)
        missing = place.missing if place else tuple(kinds)
        prompt = self._render(self.source[:turn], prompt=True) if place and missing == ("reasoning",) else ""
        if re.search(r"<think>\s*$", prompt):
            message = self.source[turn]
            thought = message.get("reasoning_content")
            if not thought:  # it stands at the beginning of the content
                thought = message["content"].split("</think>", 1)[0].replace("<think>", "", 1)
            start = place.start  # of an answer that is a call alone
            for index, field in enumerate(self.fields):
                if (field.message, field.kind) == (turn, "content") and field.size:
                    start = self._content_start(turn, rendering, int(rendering.of(index).min()))
            text = f"{prompt}{thought.strip()}\n</think>\n\n{rendering.text[start : place.end]}"
            return Rendered(
                text=text if place.ends_open else text + rendering.text[place.end :],
                spans=[(len(prompt), len(text), self.weights[turn])],
                ends_open=place.ends_open,
            )
        if place and missing and self.rules.drop_unrendered and "content" not in missing:
            self.notes["unrendered"] = self._not_rendered(turn, *missing)
            return self.sequence(rendering, {turn: place}, turn + 1)
        if missing:
            raise ValueError(f"{self._not_rendered(turn, *missing)}; {_WAY_OUT}")
        raise ValueError(
            f"message {turn + 1}: the chat template renders other messages in the midst of this answer, so its tokens"
            " cannot be told apart; use a template with {% generation %} markers (chat_template), or prompt and"
            " completion columns"
        )

    def all_trained(self, rendering: _Rendering) -> Rendered:
        """Makes the sequence of train_on: all. The last message is looked for (it may end open), and so is an answer
        of another weight.
        """
        places, length = {}, len(self.source)
        for turn, message in enumerate(self.source):
            role, weight = message["role"], self.weights[turn]
            if role == "assistant" and (weight != 1 or turn == length - 1):
                place = self.place(turn, length, rendering)
                if place is None and weight != 1:
                    raise ValueError(f"{self._not_rendered(turn, 'content')}, which has the weight {weight:g}")
                places |= {turn: place} if place else {}
            elif role != "assistant" and weight != 1:
                raise ValueError(
                    f"message {turn + 1} ({role}) has the weight {weight:g}, and train_on: all trains it; only turns of"
                    " an assistant can have a weight"
                )
        answers = self.sequence(rendering, places, length)
        spans = answers.spans if any(weight != 1 for *_, weight in answers.spans) else []
        return replace(answers, spans=[(0, len(answers.text), 1), *spans])


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _common(first: str, second: str) -> int:
    """Counts the characters that two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    return [None, *pattern.finditer(text)][-1]


def _mark(messages: list[Message], *, kept: tuple[str, ...] = ()) -> tuple[list[_Field], list[Message]]:
    """Replaces the letters of each text of the messages by a character of its own, but for tags and words in `kept`."""
    fields: list[_Field] = []
    stays = "|".join([_KEPT, *map(re.escape, kept)])
    # Runs of letters, but where words are kept, which may begin in the midst of one.
    pattern = re.compile(f"({stays})|({_LETTER}{'' if kept else '+'}|\\[)")

    def marked(value: Any, turn: int, kind: str) -> Any:
        """Marks a text, or each text within lists and objects but for keys."""
        if isinstance(value, dict):
            return {key: marked(item, turn, kind) for key, item in value.items()}
        if isinstance(value, list):
            return [marked(item, turn, kind) for item in value]
        if not isinstance(value, str) or not value.strip():
            return value
        letter = chr(_MARK + len(fields))
        text = pattern.sub(lambda match: match[1] or letter * len(match[2]), value)
        if letter not in text:  # of tags or quotes alone: nothing else is there to be found
            text = re.sub(r"\S", letter, value)
        fields.append(_Field(message=turn, kind=kind, size=text.count(letter)))
        return text

    result = []
    for turn, message in enumerate(messages):
        message = dict(message)
        content = message.get("content")
        if message.get("reasoning_content"):
            message["reasoning_content"] = marked(message["reasoning_content"], turn, "reasoning")
        elif message["role"] == "assistant" and content and "</think>" in content:
            thought, content = content.split("</think>", 1)
            # Empty thinking is no text that could be missed.
            thought = marked(thought, turn, "reasoning") if thought.replace("<think>", "").strip() else thought
            message["content"] = f"{thought}</think>{marked(content, turn, 'content')}"
            content = None
        if content:
            message["content"] = marked(content, turn, "content")
        if message.get("name") and message["role"] != "tool":  # a tool's is that of the call
            message["name"] = marked(message["name"], turn, "name")
        if message.get("tool_calls"):
            message["tool_calls"] = [
                call | {"function": marked(call["function"], turn, "tool call")} for call in message["tool_calls"]
            ]
        result.append(message)
    return fields, result


class _Forms:
    """How a template takes messages, found by rendering small ones, and the tokens it can end them with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        def renders(word: str, question: Any, answer: dict[str, Any]) -> bool:
            messages = [{"role": "user", "content": question}, {"role": "assistant"} | answer]
            try:
                return word in tokenizer.apply_chat_template([messages], chat_template=template, tokenize=False)[0]
            except TEMPLATE_ERRORS:
                return False

        def calling(arguments: Any) -> dict[str, Any]:
            function = {"name": "lookup", "arguments": arguments}
            return {"content": "", "tool_calls": [{"type": "function", "id": "call00001", "function": function}]}

        def any_of(texts: set[str]) -> re.Pattern:
            longest_first = sorted(filter(None, texts), key=len, reverse=True)
            return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        text, parts = "question", [{"type": "text", "text": "question"}]
        # Content as a list of parts, else as text; arguments of a call as JSON text, else as an object.
        self.parts = not renders(text, text, {"content": text}) and renders(text, parts, {"content": parts})
        as_object, as_json = calling({"key": "value"}), calling('{"key": "value"}')
        self.json_arguments = not renders("lookup", "q", as_object) and renders("lookup", "q", as_json)
        # Special tokens of the tokenizer as they stand in a text, and all that were added to its vocabulary.
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self.special, self.added = any_of(special), any_of({token.content for token in added} | special)
        # The words that the template compares with, longest first.
        tree = Environment(extensions=EXTENSIONS).parse(template)
        words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.constants = tuple(sorted((text for text in words if len(text.strip()) > 2), key=len, reverse=True))

    def take(self, message: Message) -> Message:
        """Returns a message as the template takes it."""
        message = {key: value for key, value in message.items() if key != "weight" and value is not None}
        if self.parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if self.json_arguments and message.get("tool_calls"):  # as a server gives them
            dumps = partial(json.dumps, ensure_ascii=False)
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        return message


_forms_of: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (template, number of tokens) -> _Forms


def _forms(tokenizer: PreTrainedTokenizerBase, template: str) -> _Forms:
    known, key = _forms_of.setdefault(tokenizer, {}), (template, len(tokenizer))
    if key not in known:
        known[key] = _Forms(tokenizer, template)
    return known[key]
