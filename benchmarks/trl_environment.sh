#!/usr/bin/env bash
# Makes an environment with TRL in the folder $1, over the packages of the python that is first on PATH: the same torch
# and transformers for every subject of benchmarks/train.py.
set -euo pipefail
python -m venv "$1"
packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
find "$packages" -maxdepth 1 -name '*.pth' -exec grep -h '^/' {} + > "$own/borrowed.pth" || true
echo "$packages" >> "$own/borrowed.pth"
"$1/bin/python" -m pip install --quiet --no-deps trl==1.16.0
