"""Prints the words that it was given, for tests of launchers: `LAUNCHER ... --module tests.launch.words WORDS`."""

import json
import os
import sys

WORDS = [
    "R&D",
    ".*\\.(q_proj|v_proj)",
    '{"min_lr_rate": 0.1}',
    '{"min_lr_rate":0.1}',
    "cost $HOME x",
    "$HOME",
    "${local_rank} of $$",
    "`hostname`",
    "$(hostname) and `hostname`",
    "a b",
    "",
    " ",
    "  two  spaces  ",
    "tab\there",
    "two\nlines",
    "two lines\nwith 'both' \"quotes\"",
    "it's",
    'say "hi"',
    "back\\slash",
    "back\\ slash\\",
    '\\" of a " b',
    "a;b",
    "a | b > c < d &",
    "*",
    "[a-z]?",
    "{a,b}",
    "~",
    "#no comment",
    "!history ! too",
    "%h %n %u %% 100%",
    "%%h",
    "a=b",
    "(x)",
    "\u00fc \u4f60\u597d \U0001f600",
    "-1",
    "--",
]
"""What a shell or a launcher understands."""

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local")]
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    print(f"words of rank {rank}: {json.dumps(words)}", flush=True)
