"""`dsft chat`: talks to a run, a checkpoint or an exported model in the terminal, in its own chat template. Answers are
streamed by transformers' TextStreamer.

Problems of the folder are reported before torch is loaded, which takes seconds.
"""

import contextlib
import sys
from pathlib import Path

from dsft.checkpoints.run_folder import find_weights
from dsft.cli.commands import ChatOptions
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.models.model_folder import adapter_base, missing
from dsft.runtime import quick_imports
from dsft.runtime.console import set_up_screen, show_text

HELP = "/system TEXT tells the model something first, /reset begins from scratch, /quit exits; Ctrl-C stops an answer"


def run(options: ChatOptions) -> None:
    """Answer each line that is typed, or `prompt` alone.

    Raises:
        UserError: where there is no model or no chat template, or, with `prompt`, no answer.
    """
    if problem := missing("model", options.model):
        raise UserError(problem)
    source = str(find_weights(options.model)) if Path(options.model).exists() else options.model
    set_up_screen()
    with quick_imports():
        from transformers import GenerationConfig, TextStreamer

        from dsft.data.chats import TEMPLATE_ERRORS
        from dsft.models.build import build_model, resolve_dtype
        from dsft.models.size import max_positions
        from dsft.models.tokenizer import chat_ids, generate, load_tokenizer
    fields = ("chat_template", "trust_remote_code", "trust_checkpoint")
    config = EvalConfig(model=source, **{name: getattr(options, name) for name in fields})
    tokenizer = load_tokenizer(config)
    if not tokenizer.chat_template:
        raise UserError(
            f"{source}: its tokenizer has no chat template, so there is no form for turns; name the one that it was"
            " trained in with --chat_template (a file, or a preset such as chatml)"
        )
    model = build_model(config, dtype=resolve_dtype(options.dtype)).eval()
    if adapter_base(source) and (Path(source) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)  # what its answers stop at
    positions = max_positions(model.config.get_text_config())

    def answer(messages: list[dict[str, str]]) -> str:
        """Print an answer while it is made."""
        try:
            ids = chat_ids(tokenizer, messages)
        except TEMPLATE_ERRORS as error:
            raise UserError(f"the chat template raised: {error}") from None
        if positions and len(ids) >= positions:
            raise UserError(f"the chat has {len(ids):,} tokens, and the model {positions:,} positions; /reset it")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        how = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
        return generate(model, tokenizer, ids, streamer=streamer, **how)

    def begun(system: str | None) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}] if system else []

    system = options.system
    messages = begun(system)
    if options.prompt is not None:
        answer([*messages, {"role": "user", "content": options.prompt}])
        return
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lines can be edited, and earlier ones called back

        show_text(f"dsft: {source}; {HELP}")
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command in ("/system", "/reset"):
            system = rest.strip() if command == "/system" else system
            messages = begun(system)
        elif command.startswith("/"):
            show_text(f"dsft: {HELP}")
        elif line:
            turn = {"role": "user", "content": line}
            try:
                messages += [turn, {"role": "assistant", "content": answer([*messages, turn])}]
            except UserError as error:
                show_text(f"dsft: {error}")
            except KeyboardInterrupt:
                print()  # the turn is taken back
