"""`python -m saccade.cli`."""

import sys

from saccade.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
