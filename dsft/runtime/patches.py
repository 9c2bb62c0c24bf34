"""Every function of a library that dsft replaces: what, why, and the versions at which that was seen to be needed. No
other module assigns into a library (tests/test_layout.py). tests/without_patches.py has the test that fails without.

A patch stands for known source code. Where the installed library has another, `if_changed` says what happens, and a
warning names the patch. What replaces a function is beside the code that needs it, for DeepSpeed's engine in
training/engine.py. Imports no library by itself.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsft.errors import UserError


@functools.cache  # many patches are of one file
def _definitions(file: Path) -> dict[str, str]:
    """The source lines of a module's functions and classes by name, and of what its classes have: `Class.method`."""
    text, definitions = file.read_text(encoding="utf-8"), {}
    lines, inner = text.split("\n"), [("", ast.parse(text))]
    for path, node in inner:
        for each in node.body:
            if name := getattr(each, "name", ""):
                definitions.setdefault(path + name, "\n".join(lines[each.lineno - 1 : each.end_lineno]))
                inner += [(f"{path}{name}.", each)] if isinstance(each, ast.ClassDef) else []
    return definitions


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement in a library."""

    target: str  # what is replaced: `module:function`, `module:Class.method`, or an attribute of one of these
    why: str
    code: tuple[str, ...] = ()  # the functions that the patch was written for; the target itself where empty
    seen: dict[str, str]  # version of the library at which the patch was seen to be needed -> digest of that code
    if_changed: Literal["refuse", "skip", "keep"] = "skip"
    """refuse: results could be wrong. skip: only time or memory is saved. keep: a patch that fits no more fails loudly,
    or does no harm.
    """

    @property
    def library(self) -> str:
        return re.split(r"[.:]", (self.code or (self.target,))[0])[0]

    @property
    def attribute(self) -> str:
        return re.split(r"[.:]", self.target)[-1]

    def digest(self) -> str:
        """Digest of the installed code, without spaces, found without an import; empty where some of it is gone."""
        sources = []
        for place in self.code or (self.target,):
            module, _, path = place.partition(":")
            library, *parts = module.split(".")
            file = Path(importlib.util.find_spec(library).origin).parent.joinpath(*parts)
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            if not file.is_file():
                return ""
            if (source := _definitions(file).get(path)) is None:
                return ""
            sources += source.split()
        return hashlib.sha256("".join(sources).encode()).hexdigest()[:12]

    @property
    def fix(self) -> str:
        return f"pip install {self.library}=={next(reversed(self.seen))}"

    @functools.cached_property
    def change(self) -> str:
        """One line where the installed library has code that is not in `seen`, else empty."""
        version = importlib.metadata.version(self.library)
        if version.split("+")[0] in self.seen or (digest := self.digest()) in self.seen.values():
            return ""
        done = {"refuse": "results could be wrong", "skip": "left out", "keep": "still applied"}
        return (
            f"{self.library} {version} {'changed' if digest else 'has no longer'}"
            f" {' or '.join(self.code or (self.target,)).replace(':', '.')}, which dsft patches since {self.why};"
            f" {done[self.if_changed]}: {self.fix}"
        )


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_FUSED = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"

PATCHES = {
    # Models.
    "token_rows": Patch(
        target="peft.tuners.trainable_tokens.layer:TrainableTokensLayer._collect_token_weights",
        why="under ZeRO-3 it collects the rows of trained tokens on CUDA alone",
        seen={"0.21.0": "5e6409948d28", "0.21.2": "5e6409948d28"},
    ),
    # The training.
    "first_step_of_zeros": Patch(
        target=f"{_UNFUSED}.initialize_optimizer_states",
        why="in ZeRO 0 it makes optimizer states in bf16 by a step that decays weights and that Adam counts",
        code=(f"{_UNFUSED}.initialize_optimizer_states", f"{_FUSED}.initialize_optimizer_states"),
        seen={"0.19.8": "3b56e521847a"},
        if_changed="refuse",
    ),
    "kept_norm": Patch(
        target=f"{_ENGINE}.clip_fp32_gradients",
        why="in fp32 of ZeRO 0 it forgets the norm of the gradients, which the log and its warnings need",
        seen={"0.19.8": "56e474852f4e"},
    ),
}
"""Name -> patch."""


def active_patches() -> dict[str, Patch]:
    """The patches of libraries that are installed; `change` of each is one line where its library differs. Imports
    none of them.
    """
    return {name: patch for name, patch in PATCHES.items() if importlib.util.find_spec(patch.library)}


WITHOUT = "DSFT_WITHOUT_PATCH"
"""Variable with the name of a patch that is left out, to see what it is needed for (tests/without_patches.py)."""


def fits(*names: str) -> bool:
    """Whether patches can be applied to the installed libraries; False where they save time or memory alone. Raises
    UserError: results could be wrong.
    """
    if names == (os.environ.get(WITHOUT),):
        return False
    changed = [PATCHES[name] for name in names if PATCHES[name].change and PATCHES[name].if_changed != "keep"]
    if refused := [patch.change for patch in changed if patch.if_changed == "refuse"]:
        raise UserError(refused)
    return not changed


_ORIGINALS = "_dsft_originals"
"""Attribute of a patched module, class or object: name of the patch -> what it replaced there."""


def _owner(patch: Patch, on: Any) -> Any:
    """The module, class or object whose attribute a patch replaces: `on`, by default the target's own."""
    if on is not None:
        return on
    module, _, path = patch.target.partition(":")
    return functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(module))


def replace(name: str, by: Callable[[Any], Any], *, on: Any = None) -> None:
    """Put `by(original)` in the place of a patch's target, or of its attribute of the object `on`. Again, it takes the
    place of the earlier replacement.
    """
    if not fits(name):
        return
    patch = PATCHES[name]
    owner = _owner(patch, on)
    if _ORIGINALS not in vars(owner):
        setattr(owner, _ORIGINALS, {})
    originals = vars(owner)[_ORIGINALS]
    if name not in originals:
        originals[name] = getattr(owner, patch.attribute, None)
    setattr(owner, patch.attribute, by(originals[name]))


@contextlib.contextmanager
def replaced(name: str, by: Callable[[Any], Any], *, on: Any = None) -> Iterator[None]:
    """`replace` inside a `with`."""
    patch, missing = PATCHES[name], object()
    owner = _owner(patch, on)
    before = vars(owner).get(patch.attribute, missing)
    is_outermost = name not in vars(owner).get(_ORIGINALS, {})
    replace(name, by, on=on)
    try:
        yield
    finally:
        if is_outermost:
            vars(owner).get(_ORIGINALS, {}).pop(name, None)
        if before is not missing:
            setattr(owner, patch.attribute, before)
        elif patch.attribute in vars(owner):  # it is the class's own again
            delattr(owner, patch.attribute)
