"""``python -m focalkern`` is the command ``focalkern``."""

import sys

from focalkern.cli import main

sys.exit(main())
