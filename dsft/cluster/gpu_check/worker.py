"""The process of one check: python -m dsft.cluster.gpu_check.worker SETTING_JSON

Writes a line of JSON for each row, as it is known, to `CHECK.jsonl`. What the check prints goes to `CHECK.log`, whose
end tells why it failed.
"""

import dataclasses
import json
import sys

from dsft.cluster.gpu_check.check import Setting
from dsft.cluster.gpu_check.checks import CHECKS, FILES


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    check = next(check for check in (FILES, *CHECKS) if check.name == setting.check)
    with setting.path(f"{check.name}.jsonl").open("w", encoding="utf-8") as rows:
        for row in check.run(setting):
            rows.write(json.dumps(dataclasses.asdict(row), default=str) + "\n")
            rows.flush()


if __name__ == "__main__":
    main()
