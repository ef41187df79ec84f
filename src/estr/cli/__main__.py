"""`python -m estr.cli`."""

from . import main

main()
