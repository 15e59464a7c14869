"""`python -m logra_lab` is the `logra-lab` command."""

import sys

from logra_lab.cli import main

sys.exit(main())
