"""`python -m raypfl`, where the command is not on the path."""

from raypfl.commands.cli import main

main()
