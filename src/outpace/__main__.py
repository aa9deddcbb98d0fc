"""``python -m outpace`` is the command ``outpace``."""

from outpace.cli import main

main()
