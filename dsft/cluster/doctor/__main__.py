"""`python -m dsft.cluster.doctor`: for launchers that start a module (`accelerate launch --module dsft.cluster.doctor`,
`deepspeed
--module dsft.cluster.doctor`).
"""

import sys

from dsft.cli.main import main

main(["doctor", *sys.argv[1:]])
