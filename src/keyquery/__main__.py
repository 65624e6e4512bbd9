"""`python -m keyquery`."""

from keyquery.cli import main

main()
