"""The process of one check: python tests/gpu/worker.py SETTING_JSON

Writes a line of JSON for each row, as it is known, to `CHECK.jsonl`. What the check prints goes to `CHECK.log`, whose
end tells why it failed.
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this folder's modules are `gpu.files`, not `files`

from gpu.check import Setting
from gpu.checks import CHECKS, FILES, SHARE, SHARE_CHECKS


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    check = next(check for check in (FILES, SHARE, *CHECKS, *SHARE_CHECKS) if check.name == setting.check)
    with setting.path(f"{check.name}.jsonl").open("w", encoding="utf-8") as rows:
        for row in check.run(setting):
            rows.write(json.dumps(dataclasses.asdict(row), default=str) + "\n")
            rows.flush()


if __name__ == "__main__":
    main()
