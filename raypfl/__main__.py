"""`python -m raypfl`, where the command is not on the path."""

from raypfl.cli.app import main

main()
