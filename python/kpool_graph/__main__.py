"""`python -m kpool_graph` is the `kpool` command."""

import sys

from .cli import main

sys.exit(main())
