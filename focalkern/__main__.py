"""``python -m focalkern`` is the command ``focalkern``."""

import sys

from focalkern.cli import main

if __name__ == "__main__":
    sys.exit(main())
