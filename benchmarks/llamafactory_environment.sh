#!/usr/bin/env bash
# Makes an environment with LLaMA-Factory in the folder $1, for benchmarks/data_speed.py: its own versions of the
# Hugging Face libraries, torch as in constraints.txt. torchaudio, which it imports and text does not need, is empty.
set -euo pipefail
python -m venv "$1"
torch=$(grep '^torch==' "$(dirname "$0")/../constraints.txt")
"$1/bin/python" -m pip install --quiet "$torch"
"$1/bin/python" -m pip install --quiet --no-deps llamafactory==0.9.5
"$1/bin/python" - <<'PY' > "$1/requirements.txt"
from importlib.metadata import requires
print("\n".join(each for each in requires("llamafactory") if not each.startswith("torch") and "extra" not in each))
PY
"$1/bin/python" -m pip install --quiet "$torch" --requirement "$1/requirements.txt"
packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
touch "$packages/torchaudio.py"
