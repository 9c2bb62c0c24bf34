"""Draws mutants of the package (one changed place each), runs the tests that know the line, and lists those that live:

    python tests/mutants.py --number 60 --seed 1                   draw 60 and run them, in a copy of this checkout
    python tests/mutants.py --number 60 --seed 1 --list            show them only
    python tests/mutants.py --number 60 --seed 1 --only 3 17 --launches    two of them, also with tests that start ranks

What is changed is a comparison, an operator, a condition, a constant, or a call that is left out; never a message or an
annotation. The tests of a mutant are those that import its module and those of its room, without `exhaustive` and
`cluster` ones. A mutant that lives is a law that is missing, or a change that no user can see: read each.
"""

import argparse
import ast
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1200
"""After which a mutant that makes its tests wait counts as killed."""
OPERATORS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
ROOMS_ELSEWHERE = {
    "api.py": ["perplexity"],
    "errors.py": ["test_errors.py"],
    "evaluate_perplexity": ["perplexity"],
    "eval_ppl.py": ["perplexity", "cli"],
    "quickstart": ["test_quickstart.py"],
    "train.py": ["training", "cli"],
    "units.py": ["test_units.py", "test_errors.py", "report"],
}
"""Parts of the package without a folder of tests of their name -> where their tests are."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    path: Path
    """Relative to the checkout."""
    line: int
    start: int
    """In bytes of the file, as `end`."""
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {' '.join(self.old.split())[:60]}  ->  {' '.join(self.new.split())[:60]}"


def mutants_of(path: Path) -> list[Mutant]:
    source = (ROOT / path).read_bytes()
    tree = ast.parse(source)
    # The byte where each line starts: ast counts columns in bytes.
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    unseen: set[int] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        parts += getattr(node, "decorator_list", [])  # frozen=True and the like
        if isinstance(node, (ast.JoinedStr, ast.Raise)):
            parts.append(node)
        unseen |= {id(each) for part in parts if isinstance(part, ast.AST) for each in ast.walk(part)}
    mutants = []
    for node in ast.walk(tree):
        if id(node) not in unseen and (new := _changed(node)) is not None:
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            old = source[start:end].decode()
            mutants.append(Mutant(path=path, line=node.lineno, start=start, end=end, old=old, new=new))
    return mutants


def _changed(node: ast.AST) -> str | None:
    """The node's text in its mutant; None where it has none."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=right) if type(operator) in OPERATORS:
            new = ast.Compare(left, [OPERATORS[type(operator)]()], right)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            # Texts and lists that are put together have no difference.
            sequences = (ast.List, ast.Tuple, ast.JoinedStr)
            if any(
                isinstance(s, sequences) or (isinstance(s, ast.Constant) and s.value is str(s.value))
                for s in (left, right)
            ):
                return None
            new = ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(op=operator, values=values):
            new = ast.BoolOp(OPERATORS[type(operator)](), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            new = operand
        case ast.Constant(value=bool(value)):
            new = ast.Constant(not value)
        case ast.Constant(value=int(value)):
            new = ast.Constant(value + 1)
        case ast.IfExp(test=test, body=body, orelse=other):
            new = ast.IfExp(test, other, body)
        case ast.Expr(value=ast.Call()):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(new)})"


def tests_of(path: Path, *, only_near: bool) -> list[str]:
    """Those that notice soonest first: of its room those that import its module, then others that import it, then the
    rest of the room.
    """
    room, module = path.parts[1], ".".join(path.with_suffix("").parts)
    files = sorted(each.relative_to(ROOT) for each in (ROOT / "tests").rglob("test_*.py"))
    package = re.escape(module.rpartition(".")[0])
    imports = re.compile(rf"\b{re.escape(module)}\b|from {package} import .*\b{path.stem}\b")
    importing = {each for each in files if imports.search((ROOT / each).read_text())}
    places = [Path("tests", name) for name in ROOMS_ELSEWHERE.get(room, [room])]
    beside = {each for each in files if any(each == place or place in each.parents for place in places)}
    first = Path("tests", room, f"test_{path.stem}.py")
    near = sorted(importing & beside | {first} & beside, key=lambda each: each != first)
    far = [*sorted(importing - beside), *sorted(beside - importing)]
    return list(map(str, near if near and only_near else dict.fromkeys([*near, *far])))


def first_failure(copy: Path, words: list[str]) -> str | None:
    """pytest in a fork of this process, which has the libraries imported and nothing of dsft; None where all pass."""
    log = copy / "pytest.log"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.chdir(copy)
        # Before the checkout that this environment has installed.
        sys.path[:0] = [str(copy)]
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "DS_ACCELERATOR": "cpu"}
        sys.dont_write_bytecode = True
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words])
        sys.stdout.flush()
        os._exit(code)
    until = time.monotonic() + SECONDS
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "not done in time"
        time.sleep(0.1)
    # 5: nothing is selected.
    if os.waitstatus_to_exitcode(done[1]) in (0, 5):
        return None
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else "")[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    parser.add_argument("--only", type=int, nargs="+", help="their numbers in the list")
    parser.add_argument("--near", action="store_true", help="only tests of its room that import its module: sooner")
    parser.add_argument("--launches", action="store_true", help="also tests that start ranks: minutes for each mutant")
    options = parser.parse_args()
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "dsft").rglob("*.py"))
    drawn = random.Random(options.seed).sample(
        [mutant for path in paths for mutant in mutants_of(path)], options.number
    )
    chosen = [(number, drawn[number]) for number in options.only or range(len(drawn))]
    if options.list:
        print(*(f"{number:3} {mutant}" for number, mutant in chosen), sep="\n")
        return
    sys.path = [path for path in sys.path if Path(path).resolve() != ROOT / "tests"]
    for library in ("deepspeed", "peft", "pytest", "transformers"):
        importlib.import_module(library)  # once, for all forks

    living = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        kinds = "not cluster and not exhaustive" + ("" if options.launches else " and not launch")
        for number, mutant in chosen:
            source, began = (ROOT / mutant.path).read_bytes(), time.monotonic()
            (copy / mutant.path).write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
            failure = first_failure(copy, ["-m", kinds, *tests_of(mutant.path, only_near=options.near)])
            (copy / mutant.path).write_bytes(source)
            if failure is None:
                living.append((number, mutant))
            result = "LIVES" if failure is None else f"killed by {failure}"
            print(f"{number:3} {mutant}\n    {result} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - len(living)} of {len(chosen)} killed; living:")
    print(*(f"{number:3} {mutant}" for number, mutant in living), sep="\n")


if __name__ == "__main__":
    main()
