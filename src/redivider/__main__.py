"""Command line as a module: `python -m redivider`."""

import sys

from redivider.cli import main

sys.exit(main())
