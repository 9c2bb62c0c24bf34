"""`dsft convert`: a configuration of axolotl, LLaMA-Factory or TRL becomes a run.yaml.

What their options mean is data: `config/elsewhere.toml`. Here a file is read, each of its options is translated, and
what has no counterpart is named, in the file and on the screen. No model, data or GPU is needed.

dsft convert axolotl.yaml --output run.yaml
dsft convert sft.sh --from trl        # a shell script with the command line
"""

import contextlib
import re
import shlex
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.commands import ConvertOptions
from dsft.config.elsewhere import DEFAULTS, OF, SAME_NAME, SUPERVISED, TEXT_ALONE, TRAINERS, CannotTrain, Elsewhere
from dsft.config.options import IGNORED_ARGUMENTS, REFUSED_ARGUMENTS, TrainConfig, argument_types
from dsft.config.reader import check_values, field_types, make_config, read_flags, read_text, read_yaml, training_types
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.chat_template import load_template
from dsft.run_setup.named_files import NOT_NEEDED
from dsft.runtime.console import show_text

SAME = {name: each for each in SAME_NAME for name in each.names.split()}
END = "\n...\n"
"""Of YAML, behind a value that is no list."""
OPERATORS = "<>|&;"
"""Of a shell, between commands and before files."""
COMMANDS = {"trl": "trl", "llamafactory-cli": "llamafactory", "axolotl": "axolotl"}
"""Program of a command line -> its trainer."""


def convert_file(options: ConvertOptions) -> None:
    """Write the run.yaml. Raises UserError where a file cannot be read or written, or the training is none that dsft
    can do.
    """
    output = Path(options.output)
    if output.exists():
        raise UserError(f"{output}: exists; name another file with --output")
    given, trainer = read_trainer_file(options.file)
    by_options = (name for name, known in TRAINERS.items() if given.keys() & set(known.split()))
    trainer = options.from_ or trainer or next(by_options, "")
    if not trainer:
        raise UserError(f"{options.file}: no options of {', '.join(TRAINERS)} in it; name the trainer with --from")
    converted = Converted(given, trainer)
    raise_if_any([f"{options.file}: {', '.join(names)}: {why}" for why, names in converted.reasons.items()])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(converted.text(source=options.file), encoding="utf-8")
    show_text(
        f"dsft: {output}: written: {len(converted.values)} options, from {len(given)} of {trainer} and its defaults"
    )
    for name, note in converted.notes:
        show_text(f"dsft: {name}: {note}")
    for problem in converted.problems:
        show_text(f"dsft: to do: {problem}")
    config = shlex.quote(str(output))
    show_text(f"dsft: next: dsft preview --config {config}, then dsft plan --config {config}")


def read_trainer_file(file: str) -> tuple[dict[str, Any], str]:
    """(options of a YAML file or of the command line in a shell script, the trainer that a command names). Raises
    UserError where it is unreadable, or its command trains otherwise than sft.
    """
    problems: list[str] = []
    if file.endswith((".yaml", ".yml", ".json")):
        given = read_yaml(file, problems)
        raise_if_any([problem.removeprefix("--config ") for problem in problems])
        return without_nulls(given or {}), ""
    try:
        text = read_text(file).replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    variables = dict(re.findall(r"^(?:export )?(\w+)=(\S+)$", text, re.MULTILINE))
    text = string.Template(text).safe_substitute(variables)
    lines = [line for line in text.splitlines() if " --" in line and not line.lstrip().startswith("#")]
    if len(lines) != 1:
        raise UserError(f"{file}: expected a .yaml file, or one command line with options; found {len(lines)}")
    words: list[str] = []
    lexer = shlex.shlex(re.sub(r"\s\d(?=[<>])", " ", lines[0]), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        for word in lexer:
            if not set(word) <= set(OPERATORS):
                words.append(word)
            elif any(each.startswith("--") for each in words):
                break  # > train.log 2>&1 | tee ...: no words of the training
            else:
                words = []  # cd folder && ...
    except ValueError as error:
        raise UserError(f"{file}: not a command line ({error})") from None
    trainer = next((COMMANDS[Path(word).name] for word in words if Path(word).name in COMMANDS), "")
    script = next((word for word in words if word.endswith(".py")), "")
    kind = Path(script).stem if script else "".join(words[words.index("trl") + 1 :][:1]) if "trl" in words else "sft"
    if trainer in ("", "trl") and (not kind.startswith("sft") or "vlm" in kind):
        raise UserError(f"{file}: {kind}: {TEXT_ALONE if 'vlm' in kind else SUPERVISED}; only sft is converted")
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    flags = read_flags([word for word in words[first:] if word != script], problems)
    raise_if_any([f"{file}: {problem}" for problem in problems])
    files = [word for word in words[:first] if word.endswith((".yaml", ".yml"))]  # axolotl train FILE --flags
    named = flags.pop("config", None) or next(iter(files), None)
    values = read_trainer_file(named)[0] if named else {}
    for name, value in flags.items():  # as a YAML file would hold it: numbers, true and false, JSON
        values[name] = value
        if isinstance(value, str):
            with contextlib.suppress(yaml.YAMLError):
                values[name] = yaml.safe_load(value)
    return without_nulls(values), trainer or "trl"


def without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """None, and the empty text that axolotl's files also have, stand for what is not given."""
    return {name: value for name, value in given.items() if value is not None and value != ""}


def left_out(why: str) -> str:
    """Why an option has none in dsft. Args: `why`: what its entry tells those who write it."""
    return "left out; " + why.removesuffix("; leave it out").removeprefix("leave it out").lstrip(";, ")


class Converted:
    """Options of dsft for those of another trainer, and what became of each."""

    def __init__(self, given: Mapping[str, Any], trainer: str):
        self.given, self.trainer = given, trainer
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """Option of dsft -> those of the trainer that it comes from."""
        self.notes: list[tuple[str, str]] = []
        """(option of the trainer, what has no counterpart in it, or what to look at)."""
        self.reasons: dict[str, list[str]] = {}
        """Why dsft cannot train it -> options that ask for it."""
        order = [*SAME, *OF]  # the table's order: an adapter before what quantises its base, and the file by groups
        for name in sorted(given, key=lambda each: order.index(each) if each in order else len(order)):
            self._add(name, given[name])
        for name, value in DEFAULTS[trainer].items():
            self._add(name, value, is_default=True)
        # Take out what the options refuse one by one, or what has nothing to act on; keep what they lack together.
        for option, value in list(self.values.items()):
            problems: list[str] = []
            checked = check_values({option: value}, training_types(), problems)
            if option == "chat_template" and not problems:
                try:
                    load_template(str(value))
                except ValueError:
                    problems.append(f"{value}: no preset or file here; the tokenizer's own is taken")
            if problems:
                self._drop(option, "; ".join(problem.split(" (choose from")[0] for problem in problems))
            elif checked[option] is None:  # "none", which is dsft's default
                del self.values[option]
            else:
                self.values[option] = checked[option]
        if self.values.get("method", "full") == "full":
            for option in [each for each in self.values if each.startswith("lora_")]:
                self._drop(option, "all weights are trained", is_noted="default" not in self.origins[option])
        if not self.values.get("eval_data") and not self.values.get("eval_fraction"):
            for option in [each for each in self.values if each in ("eval_strategy", "eval_steps")]:
                self._drop(option, "no held-out data is given")
        problems = []
        make_config(TrainConfig, self.values, problems)
        self.problems = [each for each in problems if not each.startswith(NOT_NEEDED[2])]

    def _add(self, name: str, value: Any, *, is_default: bool = False) -> None:
        """Translate one option; a default takes the place of none that is given."""
        notes: list[str] = []
        elsewhere = SAME.get(name) or OF.get(name)
        options: Mapping[str, Any] = {}
        try:
            options = self._translated(name, value, elsewhere, notes)
        except CannotTrain as error:
            self.reasons.setdefault(str(error), []).append(name)
        except (ValueError, TypeError, AttributeError, KeyError):
            notes.append(f"{value!r} cannot be read as {self.trainer} has it")
        if is_default:
            options = {option: each for option, each in options.items() if option not in self.values}
        if not (options or notes or is_default or value in (False, 0) or name not in {*SAME, *OF}):
            notes += [] if elsewhere.is_refused else [left_out(elsewhere.how)]  # nothing vanishes in silence
        self.notes += [(name, note) for note in notes]
        for option, each in options.items():
            source = f"{self.trainer}'s default" if is_default else name
            before = self.origins.get(option)
            self.origins[option] = f"{before}, {source}" if before and source not in before.split(", ") else source
            self.values[option] = each

    def _translated(self, name: str, value: Any, elsewhere: Elsewhere | None, notes: list[str]) -> Mapping[str, Any]:
        """Options of dsft for one of the trainer's."""
        ours = [option for option in (elsewhere.ours.split() if elsewhere else [name]) if option in training_types()]
        if elsewhere is None and not ours:
            notes.append("no counterpart")
            return {}
        if elsewhere is None or elsewhere.becomes is None:
            why = IGNORED_ARGUMENTS.get(name) or (value and REFUSED_ARGUMENTS.get(name))
            if why or not ours:
                notes.append(left_out(why or elsewhere.how))
                return {}
            return {ours[0]: value}
        if not isinstance(elsewhere.becomes, Mapping):
            return elsewhere.becomes(value, self.given, notes)
        if isinstance(value, (str, int, float)) and value in elsewhere.becomes:
            return elsewhere.becomes[value]
        if elsewhere.is_refused:
            self.reasons.setdefault(elsewhere.how, []).append(f"{name}={value}" if isinstance(value, str) else name)
        elif name in SAME:
            return {name: value}
        else:
            notes.append(f"{value}: no counterpart; {elsewhere.how}".rstrip("; "))
        return {}

    def _drop(self, option: str, reason: str, *, is_noted: bool = True) -> None:
        del self.values[option]
        if is_noted and (self.origins[option], reason) not in self.notes:
            self.notes.append((self.origins[option], reason))

    def text(self, *, source: str) -> str:
        """The run.yaml: options with the names that they come from, then all that was left out."""
        lines = [f"# {source}, as {self.trainer} has it, converted by dsft convert.", ""]
        order = [*field_types(TrainConfig), *argument_types()]
        for option in sorted(self.values, key=order.index):
            written = yaml.safe_dump(self.values[option], default_flow_style=True, width=10_000, allow_unicode=True)
            comment = "" if self.origins[option] == option else f"  # {self.origins[option]}"
            lines.append(f"{option}: {written.removesuffix(END).rstrip()}{comment}")
        if self.notes:
            lines += ["", "# Without a counterpart, or to look at:"]
            lines += [f"# {name}: {one_line(note)}" for name, note in self.notes]
        return "\n".join(lines) + "\n"
