"""`python -m dsft.doctor`: for launchers that start a module (`accelerate launch --module dsft.doctor`, `deepspeed
--module dsft.doctor`).
"""

import sys

from dsft.cli import main

main(["doctor", *sys.argv[1:]])
