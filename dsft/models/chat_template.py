"""Chat templates by name: presets and Jinja files. Loads no library but Jinja.

A preset is a file of `templates/`, by its name without the ending; nothing else lists the presets.
"""

import json
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from dsft.config.reader import read_text

PRESETS = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}


class _Generation(Extension):
    """The tag {% generation %}, with which transformers marks what an assistant writes; here its body alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = (_Generation, "jinja2.ext.loopcontrols")
"""What transformers' templates use beyond plain Jinja."""


def load_template(name: str) -> str:
    """Returns the text of a preset or a file; of a JSON file, as older packages with images have one, that of its key
    chat_template. Raises ValueError where it is neither, or is no Jinja.
    """
    try:
        template = read_text(PRESETS.get(name, name))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name} is neither a file that can be read ({error}) nor one of the presets {', '.join(sorted(PRESETS))}"
        ) from None
    if name.endswith(".json"):  # as it stands it would be Jinja too, whose text is written around each chat
        try:
            template = json.loads(template)["chat_template"]
        except (ValueError, LookupError, TypeError):
            template = None
        if not isinstance(template, str):
            raise ValueError(f"{name} holds no text under the key chat_template")
    try:
        Environment(extensions=EXTENSIONS).compile(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: not valid Jinja ({error.message})") from None
    return template
