"""`dsft checkpoints`, `verify`, `export`, `merge`, `chat`, `report`, `compare`. Problems of folders are reported before
torch is loaded, which takes seconds.
"""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import MANIFEST, bytes_of, checkpoints, files_of, integrity_errors, read_manifest
from dsft.checkpoints.run_folder import (
    FINAL,
    FROM_WEIGHTS,
    check_new_folder,
    find_adapter,
    find_weights,
    known_run,
)
from dsft.cli.commands import ChatOptions, CompareOptions, ExportOptions, FolderOptions, MergeOptions, ReportOptions
from dsft.config.options import EvalConfig
from dsft.errors import UserError, raise_if_any
from dsft.models.model_folder import base_revision, missing, step_folder
from dsft.runtime import quick_imports
from dsft.runtime.console import print_json, set_up_screen, show_table, show_text
from dsft.units import GB, plural

CHAT_HELP = "/reset begins from scratch, /quit exits; Ctrl-C stops an answer"
Message = dict[str, Any]


def show_checkpoints(options: FolderOptions) -> None:
    """Print checkpoints, oldest first, and how to resume from the newest. Raises UserError without any."""
    from rich.table import Column, Table

    folders = checkpoints(options.folder)
    if not folders:
        raise UserError(f"{options.folder}: contains no checkpoints; name an output_dir of dsft train")
    newest = None
    columns = [Column(name, justify="right") for name in ("step", "loss", "GB", "ranks", "ZeRO")]
    table = Table(*columns, "complete")
    for folder in folders:
        errors = integrity_errors(folder)
        manifest = {} if errors else read_manifest(folder)
        newest = newest if errors else folder
        loss = manifest.get("loss")
        table.add_row(
            folder.name.rpartition("-")[2],
            "" if loss is None else f"{loss:.4g}",
            f"{bytes_of(folder) / GB:.3g}",
            str(manifest.get("world_size", "")),
            str(manifest.get("zero_stage", "")),
            f"no: {errors[0]}" if errors else "yes",
        )
    show_table(table)
    if newest:
        is_whole = step_folder(newest)  # None with save_only_model
        way = "the command of the run with --resume_from_checkpoint auto" if is_whole else FROM_WEIGHTS
        show_text(f"dsft: to resume from {newest}: {way}")


def verify_checkpoint(options: FolderOptions) -> None:
    """Compare every file of a checkpoint, or of all in a run's folder, with the manifest. Raises UserError."""
    path = Path(options.folder)
    if not path.is_dir():
        raise UserError(f"{path}: is not a folder")
    folders = [path]
    if not (path / MANIFEST).is_file():  # a run's folder, or a checkpoint whose files are reported as missing
        folders = [*checkpoints(path), *filter(Path.is_dir, [path / FINAL])] or [path]
    raise_if_any([f"{folder}: {error}" for folder in folders for error in integrity_errors(folder, hash_tensors=True)])
    for folder in folders:
        files = plural(len(files_of(folder)), "file")
        show_text(f"dsft: {folder} is complete: {files}, {bytes_of(folder) / GB:.3g} GB, as they were written")


def export_or_merge(options: ExportOptions | MergeOptions) -> None:
    """Write a run or checkpoint, or an adapter merged into its base model, as a plain Hugging Face folder."""
    is_merge = isinstance(options, MergeOptions)
    (find_adapter if is_merge else find_weights)(options.source)
    check_new_folder(options.out)
    set_up_screen()
    with quick_imports():
        from dsft.checkpoints.export import export, merge

    folder = (merge if is_merge else export)(**dataclasses.asdict(options))
    show_text(f"dsft: written: {folder}")


def chat(model: str, prompt: str, **options: Any) -> str:
    """Return the answer of a run, a checkpoint or a model. Args: `options`: those of `dsft chat`."""
    with contextlib.redirect_stdout(io.StringIO()):  # the command streams the answer
        return run_chat(ChatOptions(model, prompt=prompt, **options))


def run_chat(options: ChatOptions) -> str | None:
    """Answer each typed line, or `prompt`, as transformers' TextStreamer prints it. Raises UserError."""
    if problem := missing("model", options.model):
        raise UserError(problem)
    source = options.model
    if Path(source).exists():
        source = str(find_weights(source))
    set_up_screen()
    with quick_imports():
        from transformers import TextStreamer

        from dsft.data.chats import TEMPLATE_ERRORS, chat_ids
        from dsft.data.tokens import encode_open
        from dsft.models.build import build_model, resolve_dtype
        from dsft.models.measure import max_positions
        from dsft.models.tokenizer import generate, load_tokenizer
    config = EvalConfig(
        model=source,
        revision=base_revision(source),
        chat_template=options.chat_template,
        trust_remote_code=options.trust_remote_code,
        trust_checkpoint=options.trust_checkpoint,
    )
    tokenizer = load_tokenizer(config)
    if not tokenizer.chat_template and not options.raw:
        raise UserError(
            f"{source}: its tokenizer has no chat template; --raw continues text, and --chat_template names the"
            " template that it was trained in (a file, or a preset such as chatml)"
        )
    folder = Path(options.model)
    facts = known_run(folder) or known_run(folder.parent)
    if not options.raw and facts.get("uses_chat_template") is False:
        note = "dsft: note: this model was trained on rows without its chat template; --raw continues text"
        print(note, file=sys.stderr)
    model = build_model(config, dtype=resolve_dtype(options.dtype)).eval()
    positions = max_positions(model.config.get_text_config())

    def answer(messages):
        """Print an answer; return it as the message for the next turn's prompt."""
        try:
            if options.raw:
                (ids,) = encode_open(tokenizer, [messages[-1]["content"]])
            else:
                ids = chat_ids(tokenizer, messages)
        except TEMPLATE_ERRORS as error:
            raise UserError(f"the chat template raised: {error}") from None
        if positions and len(ids) >= positions:
            way_out = "/reset it" if options.prompt is None else "shorten --prompt"
            raise UserError(f"the chat has {len(ids):,} tokens, and the model {positions:,} positions; {way_out}")
        made = generate(
            model,
            tokenizer,
            ids,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )
        if tokenizer.response_template and not options.chat_template:  # finds reasoning, which later turns leave out
            with contextlib.suppress(ValueError):  # the answer does not match the template
                return {"content": ""} | tokenizer.parse_response(made, prefix=ids)
        content = tokenizer.decode(made, skip_special_tokens=True)
        text = tokenizer.decode(made)
        if "<|channel|>" in text:  # gpt-oss: its tokenizer has no response_template
            content = re.sub(r"<\|\w+\|>$", "", text.partition("<|channel|>final<|message|>")[2])
        return {"role": "assistant", "content": content}

    begin = [{"role": "system", "content": options.system}] if options.system else []
    if options.prompt is not None:
        return answer([*begin, {"role": "user", "content": options.prompt}])["content"]
    if sys.stdin.isatty():
        show_text(f"dsft: {source}; {CHAT_HELP}")
    _talk(answer, begin)


def _talk(answer: Callable[[list[Message]], Message], begin: list[Message]) -> None:
    """Read lines until /quit or the end of input, and answer each as the next turn of a chat."""
    messages = [*begin]
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  for line editing and history
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = [*begin]
        elif line.startswith("/"):
            show_text(f"dsft: {CHAT_HELP}")
        elif line:
            turn = {"role": "user", "content": line}
            try:
                messages += [turn, answer([*messages, turn])]
            except UserError as error:
                show_text(f"dsft: {error}")
            except KeyboardInterrupt:
                print()  # the turn is dropped


def run_report(options: ReportOptions) -> None:
    """Write the page of runs. Raises UserError if a folder is not a run."""
    with quick_imports():
        from dsft.run_page.page import report

    show_text(f"dsft: written: {report(*options.runs, out=options.out)}")


def run_compare(options: CompareOptions) -> None:
    """Print a table of comparisons, or one JSON object. Raises UserError if results cannot be compared."""
    with quick_imports():
        from dsft.perplexity.compare import compare_results, read_evaluations
        from dsft.perplexity.results import finite

    comparisons = compare_results(read_evaluations(options.results), base=options.base, group_by=options.group_by)
    if options.json:
        print_json({"comparisons": finite([dataclasses.asdict(each) for each in comparisons])})
    else:
        show_table(comparisons.overview())
