"""`python -m edge_rt`: the command line where the script `edge-rt` is not on PATH."""

import sys

from edge_rt.cli import main

sys.exit(main())
