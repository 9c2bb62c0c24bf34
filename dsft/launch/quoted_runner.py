"""DeepSpeed's launcher for folders that a shell would read as something else: their paths are quoted for the nodes.

    python -m dsft.launch.quoted_runner --hostfile hosts --module dsft.train ...     as `deepspeed`

Words of the run are quoted by `dsft launch` (`launchers.for_pdsh`), and variables in the file that it writes.
"""

import os
import shlex
import sys

from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import PDSHRunner

from dsft.runtime import patches


class QuotedRunner(PDSHRunner):
    """DeepSpeed writes `cd FOLDER;` and Python's path as they are: `cd my runs;` stays in the home folder."""

    def get_cmd(self, environment: dict, active_resources: dict) -> tuple[list[str], list[str], dict]:
        command, kill_command, environment = super().get_cmd(environment, active_resources)
        # What pdsh, which writes host, rank and user for %h, %n and %u, and the shell of each node turn into the paths.
        folder, python = (shlex.quote(path).replace("%", "%%") for path in (os.path.abspath("."), sys.executable))
        quoted = {f"cd {os.path.abspath('.')};": f"cd {folder} &&", sys.executable: python}
        missing = [word for word in quoted if word not in command]
        assert not missing, f"this DeepSpeed writes another command than 0.19.8: {missing} not in {command}"
        return [quoted.get(word, word) for word in command], kill_command, environment


if __name__ == "__main__":
    patches.replace("pdsh_quotes", lambda _: QuotedRunner)
    runner.main()
