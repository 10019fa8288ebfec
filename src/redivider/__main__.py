"""`python -m redivider` is the command line."""

import sys

from redivider.cli import main

sys.exit(main())
