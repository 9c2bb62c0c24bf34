import enum
import typing

from transformers import TrainingArguments

from dsft.config.options import argument_types
from dsft.config.reader import field_types


def described(hint) -> object:
    """A type without the module that its enumerations come from."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {member.name: member.value for member in hint}
    members = typing.get_args(hint)
    return (typing.get_origin(hint), *map(described, members)) if members else hint


def test_the_types_in_the_source_are_those_of_the_class():
    read, imported = argument_types(), field_types(TrainingArguments)
    other = {name for name in read.keys() | imported.keys() if described(read.get(name)) != described(imported[name])}
    assert other == {"parallelism_config", "debug"}, (
        "of classes that are no part of these modules; the first is refused"
    )
